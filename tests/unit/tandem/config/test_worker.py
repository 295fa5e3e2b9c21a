"""A worker's own settings from its place in the cluster."""

from pathlib import Path

import pytest
import torch
import yaml
from pydantic import SecretStr

from cluster.cli.cert import make_certificate
from engine.adapters.store import AdapterStore
from tandem.config.cluster import ClusterConfig
from tandem.config.cluster_tls import ClusterTls
from tandem.config.pools import PoolConfig, rank_port
from tandem.config.worker import (
    cluster_secret,
    listen_address,
    max_adapter_bytes,
    memory_here_bytes,
    num_ranks,
    worker_host,
)
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import open_credentials
from tandem.values.roles import WorkerRole
from worker.node_group import node_group

ROOT = Path(__file__).resolve().parents[4]
NAMES_BYTES = 8 << 20
"""What a worker adds: names and places of tensors in the file."""


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*"])
def test_worker_wildcard_address_is_refused(host: str) -> None:
    pool = PoolConfig(addresses=(f"{host}:4001",))
    with pytest.raises(ConfigError, match="not where a peer can reach this worker"):
        listen_address(pool, "decode", 0)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:x", "host:70000", ":1"])
def test_worker_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="not host:port"):
        listen_address(PoolConfig(addresses=(address,)), "decode", 0)


def test_worker_finds_its_address_in_list() -> None:
    pool = PoolConfig(addresses=("10.0.0.2:4001", "10.0.0.3:4002"))
    assert listen_address(pool, "decode", 1) == ("10.0.0.3", 4002)
    for index in (2, -1):
        with pytest.raises(ConfigError, match="names 2 workers"):
            listen_address(pool, "decode", index)


def test_cluster_without_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="secret is not set"):
        cluster_secret(ClusterConfig())
    assert cluster_secret(ClusterConfig(secret=SecretStr("0123456789abcdef"))) == b"0123456789abcdef"


def test_worker_with_own_host_needs_no_list() -> None:
    assert listen_address(PoolConfig(host="10.1.2.3", port=7000), "decode", 5) == ("10.1.2.3", 7000)
    assert listen_address(PoolConfig(host="fd00::3", port=7000), "decode", 0) == ("[fd00::3]", 7000)
    stated = PoolConfig(host="10.1.2.3", port=7000, addresses=("10.0.0.2:4001",))
    assert listen_address(stated, "decode", 0) == ("10.0.0.2", 4001)
    with pytest.raises(ConfigError, match=r"decode\.host: 0\.0\.0\.0 is not where"):
        listen_address(PoolConfig(host="0.0.0.0", port=7000), "decode", 0)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("engine", [{"adapter_bytes": 1_000_003}, {"memory_bytes": 16_000_048}])
def test_router_and_worker_bound_the_files_of_adapters_alike(engine: dict[str, int], dtype: str, size: int) -> None:
    config = ClusterConfig.model_validate({"engine": engine, "model": {"dtype": dtype}})
    store = object.__new__(AdapterStore)
    store.capacity_bytes = 1_000_003 // size
    store._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    store._shards = (None,) * size  # type: ignore[assignment]
    most = max_adapter_bytes(config)
    # A worker rounds down for each of its ranks; the router does not know the ranks of both pools.
    assert most is not None
    assert 0 <= most + NAMES_BYTES - store.max_file_bytes < 8 * size
    assert max_adapter_bytes(ClusterConfig()) is None


M = 10 << 30


@pytest.mark.parametrize(
    ("prefill", "decode", "here"),
    [
        ({"addresses": ["127.0.0.1:1", "localhost:2"], "replicas": 2}, {"addresses": ["127.0.0.2:1"]}, 3 * M),
        ({"addresses": ["10.0.0.1:1"], "replicas": 4}, {"addresses": ["10.0.0.1:2"]}, 5 * M),
        ({"replicas": 0}, {"addresses": ["[fd00::1]:1", "[fd00::1]:2"], "replicas": 2}, 2 * M),
        ({"addresses": ["10.0.0.1:1"]}, {"addresses": ["10.0.0.1:2", "10.0.0.2:2"], "replicas": 2}, M),
        ({"addresses": ["10.0.0.1:1"]}, {"addresses": ["10.0.0.2:2"]}, M),
        ({"replicas": 5}, {"replicas": 5}, M),
        ({"port": 7000, "host": "10.0.0.1", "replicas": 9}, {"port": 7000, "host": "10.0.0.1"}, M),
        (
            {"replicas": 0},
            {"addresses": ["10.0.0.1:1"], "tensor_parallel_size": 4, "nodes": 2, "rank_port": 9},
            M // 2,
        ),
        ({"replicas": 0}, {"tensor_parallel_size": 4, "nodes": 4, "rank_port": 9}, M // 4),
    ],
)
def test_memory_here_counts_workers_on_same_host(
    prefill: dict[str, object], decode: dict[str, object], here: int
) -> None:
    """Only workers known to share one."""
    config = ClusterConfig.model_validate({"engine": {"memory_bytes": M}, "prefill": prefill, "decode": decode})
    assert memory_here_bytes(config, config.decode) == here
    assert memory_here_bytes(ClusterConfig(), PoolConfig()) is None


def test_num_ranks_with_own_hosts_counts_one_worker() -> None:
    together = ClusterConfig(prefill=PoolConfig(replicas=3), decode=PoolConfig(replicas=2, tensor_parallel_size=2))
    assert num_ranks(together, together.prefill) == 7
    apart = ClusterConfig(
        prefill=PoolConfig(replicas=3, port=7000), decode=PoolConfig(replicas=2, tensor_parallel_size=2, port=7000)
    )
    assert (num_ranks(apart, apart.prefill), num_ranks(apart, apart.decode)) == (1, 2)


def test_ranks_on_other_nodes_find_leader() -> None:
    spread = {"tensor_parallel_size": 4, "nodes": 2, "rank_port": 7100}
    stated = PoolConfig(addresses=("10.0.0.2:4001", "10.0.0.2:4002"), replicas=2, **spread)
    own = PoolConfig(host="10.1.2.3", port=7000, **spread)
    # Workers that may share a machine share no port; those of hosts of their own all have the same.
    assert [rank_port(stated, 0), rank_port(stated, 1), rank_port(own, 5)] == [7100, 7101, 7100]
    config = ClusterConfig(prefill=own, decode=stated)
    assert worker_host(config, WorkerRole.DECODE, 1) == "10.0.0.2"
    with pytest.raises(ConfigError, match="with --leader"):
        worker_host(config, WorkerRole.PREFILL, 0)
    assert num_ranks(config, own) == 2
    by_hand = ClusterConfig(prefill=PoolConfig(replicas=0), decode=stated)
    assert num_ranks(by_hand, stated) == 4, "the other four are on other machines"


def test_example_of_two_machines_is_valid(tmp_path):
    page = (ROOT / "docs/operate/kubernetes.md").read_text(encoding="utf-8")
    text = page.partition("Outside Kubernetes do the same by hand")[2]
    example = ClusterConfig.model_validate(yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0]))
    host, port = listen_address(example.decode, "decode", 0)
    assert (host, port, worker_host(example, WorkerRole.DECODE, 0)) == ("10.0.0.1", 7000, host)
    tls = example.cluster.tls
    assert (tls.cert, tls.key, tls.ca) == tuple(
        f"/etc/tandem/{name}" for name in ("member.pem", "member.key", "ca.pem")
    )
    make_certificate(tmp_path, "member", days=1)
    here = ClusterTls(cert=f"{tmp_path}/member.pem", key=f"{tmp_path}/member.key", ca=f"{tmp_path}/ca.pem")
    group = node_group(example, WorkerRole.DECODE, 0, host, open_credentials(here, [host]))
    assert (list(group.ranks_of(1)), group.port, group.join_s) == ([2, 3], 7100, 600.0)


def test_ranks_on_several_nodes_without_tls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolConfig(tensor_parallel_size=2, nodes=2, rank_port=7100)
    config = ClusterConfig(decode=pool, secret=SecretStr("0123456789abcdef"))
    assert node_group(config, WorkerRole.PREFILL, 0, "10.0.0.2", None) is None
    monkeypatch.setenv("GROUP_REVISION", "7d9f")
    group = node_group(config, WorkerRole.DECODE, 0, "[::1]", None)
    assert (group.host, group.revision) == ("::1", "7d9f")
    with pytest.raises(
        ConfigError, match=r"decode.nodes is 2: beyond this machine .* needs cluster.tls or transfer.tls"
    ):
        node_group(config, WorkerRole.DECODE, 0, "10.0.0.2", None)
