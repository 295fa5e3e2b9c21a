"""The transport of two workers, and a clear error for a forced one that cannot work."""

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.transports import catalogue, same_host
from kv_transfer.transports.catalogue import candidates, check_choice, chunk_bytes_over, open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.nixl import agent as nixl_agent
from kv_transfer.transports.torch_dist import communicator
from tandem.errors import ConfigError
from tests.support.kv_transfer.device_fakes import HostSharing, on_device
from tests.support.kv_transfer.transport_peer import make_region

ANYWHERE = "0.0.0.0"
"""An address that is not of this machine alone."""


@dataclass(frozen=True)
class Side:
    isolated: bool = False
    rdma: bool = False
    gpu: bool = False
    choice: str = "auto"


PLAIN, FABRIC = Side(), Side(isolated=True, rdma=True)
GPU = Side(gpu=True)


@pytest.fixture
def region() -> Iterator[KVRegion]:
    region = make_region(seed=0)
    yield region
    os.close(region.fd)


def offered(monkeypatch, region, prefill: Side, decode: Side, *, where: str) -> list[str]:
    """Transports that the prefill worker would try, best first."""
    monkeypatch.setattr(nixl_agent, "problem", lambda _device: None)
    fabric = MemoryFabric() if where == "same process" else None
    shared = {"fabric": fabric, "sharing": HostSharing(region.fd)}
    address = ANYWHERE if where == "other host" else "127.0.0.1"
    with ExitStack() as stack:
        monkeypatch.setattr(catalogue, "has_rdma", lambda: decode.rdma)
        there = on_device(region) if decode.gpu else region
        receivers = open_receivers(
            there, choice=decode.choice, host=address, isolated_network=decode.isolated, **shared
        )
        offers = []
        for receiver in receivers:
            stack.callback(receiver.close)
            offer = receiver.offer()
            offers.append(replace(offer, host_id="another") if where == "other host" and offer.host_id else offer)
        monkeypatch.setattr(catalogue, "has_rdma", lambda: prefill.rdma)
        here = on_device(region) if prefill.gpu else region
        senders = open_senders(here, choice=prefill.choice, isolated_network=prefill.isolated, **shared)
        return [sender.name for sender, _ in candidates(offers, senders)]


@pytest.mark.parametrize(
    ("where", "prefill", "decode", "expected"),
    [
        ("same process", PLAIN, PLAIN, "memory"),
        ("same process", FABRIC, FABRIC, "memory"),
        ("same host", PLAIN, PLAIN, "shm"),
        ("same host", FABRIC, FABRIC, "shm"),
        ("same host", GPU, GPU, "cuda_ipc"),
        ("same host", GPU, PLAIN, "shm"),
        ("same host", PLAIN, GPU, "tcp"),
        ("same process", GPU, GPU, "cuda_ipc"),
        ("other host", PLAIN, PLAIN, "tcp"),
        ("other host", GPU, GPU, "tcp"),
        ("other host", FABRIC, FABRIC, "nixl"),
        ("other host", replace(FABRIC, gpu=True), FABRIC, "nixl"),
        ("other host", FABRIC, replace(FABRIC, gpu=True), "tcp"),
        ("other host", replace(FABRIC, gpu=True), GPU, "tcp"),
        ("other host", replace(FABRIC, isolated=False), FABRIC, "tcp"),
        ("other host", FABRIC, replace(FABRIC, isolated=False), "tcp"),
        ("other host", replace(FABRIC, rdma=False), FABRIC, "tcp"),
        ("other host", FABRIC, replace(FABRIC, rdma=False), "tcp"),
        ("other host", FABRIC, replace(FABRIC, choice="tcp"), "tcp"),
        ("same host", replace(PLAIN, choice="tcp"), PLAIN, "tcp"),
        ("same host", PLAIN, replace(PLAIN, choice="tcp"), "tcp"),
        ("same host", replace(PLAIN, choice="nixl"), replace(PLAIN, choice="nixl"), "nixl"),
        ("same host", replace(PLAIN, choice="torch_dist"), replace(PLAIN, choice="torch_dist"), "torch_dist"),
        ("same host", replace(PLAIN, choice="shm"), replace(PLAIN, choice="tcp"), None),
        ("other host", replace(PLAIN, choice="shm"), PLAIN, None),
        ("other host", replace(PLAIN, choice="nixl"), replace(FABRIC, choice="nixl"), None),
        ("other host", replace(PLAIN, choice="torch_dist"), replace(FABRIC, choice="torch_dist"), None),
    ],
)
def test_catalogue_best_common_transport_is_chosen(monkeypatch, region, where, prefill, decode, expected) -> None:
    names = offered(monkeypatch, region, prefill, decode, where=where)
    assert (names[0] if names else None) == expected


@pytest.mark.parametrize("choice", ["memory", "carrier-pigeon"])
def test_catalogue_impossible_forced_transport_is_config_error(region: KVRegion, choice: str) -> None:
    with pytest.raises(ConfigError, match=choice):
        open_senders(region, choice=choice)
    with pytest.raises(ConfigError, match=choice):
        open_receivers(region, choice=choice)


def test_catalogue_shm_without_shared_memory_is_refused(region: KVRegion) -> None:
    with pytest.raises(ConfigError, match="shared memory"):
        open_receivers(replace(region, fd=None), choice="shm")


@pytest.mark.parametrize("choice", ["nixl", "torch_dist"])
def test_catalogue_forced_transport_is_checked_before_pool_exists(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    for module in (nixl_agent, communicator):
        monkeypatch.setattr(module, "problem", lambda *_: None)
    check_choice(choice, host="127.0.0.1", isolated_network=False)
    check_choice(choice, host=ANYWHERE, isolated_network=True)
    with pytest.raises(ConfigError, match=f"'{choice}', which is neither encrypted.*isolated_network: true"):
        check_choice(choice, host=ANYWHERE, isolated_network=False)
    for module in (nixl_agent, communicator):
        monkeypatch.setattr(module, "problem", lambda *_: "needs what is not here")
    with pytest.raises(ConfigError, match=f"'{choice}', which needs what is not here"):
        check_choice(choice, host="127.0.0.1", isolated_network=False)
    for other in ("auto", "tcp", "shm"):
        check_choice(other, host=ANYWHERE, isolated_network=False)


@pytest.mark.parametrize("choice", ["nixl", "torch_dist"])
def test_catalogue_insecure_transport_needs_private_network(
    monkeypatch: pytest.MonkeyPatch, region: KVRegion, choice: str
) -> None:
    monkeypatch.setattr(nixl_agent, "problem", lambda _device: None)
    with pytest.raises(ConfigError, match="isolated_network"):
        open_receivers(region, choice=choice, host=ANYWHERE)
    [receiver] = open_receivers(region, choice=choice, host=ANYWHERE, isolated_network=True)
    receiver.close()


@pytest.mark.parametrize("broken", [ImportError("No module named 'nixl'"), OSError("libucp.so: wrong ELF class")])
def test_catalogue_unloadable_nixl_is_not_offered_and_forcing_it_fails(
    monkeypatch: pytest.MonkeyPatch, region: KVRegion, broken: Exception
) -> None:
    def load(name: str) -> object:
        if name.startswith("nixl"):
            raise broken
        return importlib.__import__(name)

    monkeypatch.setattr(nixl_agent.importlib, "import_module", load)
    monkeypatch.setattr(catalogue, "has_rdma", lambda: True)
    receivers = open_receivers(region, isolated_network=True)
    assert [receiver.name for receiver in receivers] == ["shm", "tcp"]
    for receiver in receivers:
        receiver.close()
    assert [sender.name for sender in open_senders(region, isolated_network=True)] == ["shm", "tcp"]
    for force in (open_receivers, open_senders):
        with pytest.raises(ConfigError, match=str(broken)):
            force(region, choice="nixl")


@pytest.mark.parametrize("choice", ["shm", "memory"])
def test_catalogue_host_transport_refuses_gpu_memory(region: KVRegion, choice: str) -> None:
    with pytest.raises(ConfigError, match="GPU memory"):
        open_receivers(on_device(region), choice=choice, fabric=MemoryFabric())


def test_catalogue_cuda_ipc_without_gpu_is_refused(region: KVRegion) -> None:
    for force in (open_receivers, open_senders):
        with pytest.raises(ConfigError, match="GPU"):
            force(region, choice="cuda_ipc")


def test_has_rdma_follows_the_kernels_list(tmp_path) -> None:
    assert not same_host.has_rdma(tmp_path / "infiniband")
    (tmp_path / "infiniband").mkdir()
    assert not same_host.has_rdma(tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    assert same_host.has_rdma(tmp_path / "infiniband")


def test_catalogue_chunks_suit_the_slowest_lane() -> None:
    assert chunk_bytes_over(["cuda_ipc"]) == 64 << 20
    assert chunk_bytes_over(["cuda_ipc", "tcp"]) == 8 << 20


def test_catalogue_nixl_chunks_are_large_into_devices() -> None:
    assert chunk_bytes_over(["nixl"]) == 8 << 20
    assert chunk_bytes_over(["nixl", "cuda_ipc"], to_device=True) == 64 << 20
    assert chunk_bytes_over(["nixl", "tcp"], to_device=True) == 8 << 20
