"""Seven containers with addresses of their own, as seven machines: two routers, four workers, Redis.

Workers are found through Redis, whose name is in each machine's list of hosts: that is what stands for DNS here.
"""

import hashlib
import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from redis.asyncio import Redis

from cluster.cli.cert import make_certificate
from tandem.cluster_state.entries import Process
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tests.containers.engine import Engine
from tests.containers.images import SERVICES, Images

ROUTERS = ("router-0", "router-1")
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
WORKERS = (*PREFILL, *DECODE)
NODES = (*ROUTERS, *WORKERS, "redis")
NETWORK = "tandem-nodes"
_CONFIG = "/etc/tandem/cluster/cluster.yaml"
_CERTS = "/etc/tandem/certs"
_USER = 10001
"""Of both images."""
_CHAIN_WAIT = ("iptables", "--wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one router says about the cluster."""

    workers: dict[str, dict[str, Any]]
    num_other_routers: int


class Nodes:
    """The cluster; a context manager."""

    def __init__(self, engine: Engine, images: Images) -> None:
        self._engine = engine
        self._images = images
        self.key = f"sk-{secrets.token_hex(16)}"
        self.addresses: dict[str, str] = {}
        self._killed: set[str] = set()
        self._pids: dict[str, int] = {}
        self._folder = engine.folder / "nodes"
        self._hosts = self._folder / "hosts"
        self._cut: set[tuple[str, str]] = set()
        self._draw: Iterator[str] = iter(())

    def __enter__(self) -> "Nodes":
        subnet = self._engine.network(NETWORK)
        self._draw = (f"{subnet}.{number}" for number in itertools.count(10))
        for folder in (self._folder, self._folder / "cache"):
            folder.mkdir()
            folder.chmod(0o1777)
        config = self._folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(self._settings()))
        config.chmod(0o644)
        self._hosts.write_text("127.0.0.1 localhost\n")
        make_certificate(self._folder / "certs", "member", days=1)
        for path in (self._folder / "certs", *(self._folder / "certs").iterdir()):
            os.chown(path, _USER, _USER)
        # Once for all machines: each would do it.
        for module in ("engine.kernels.cpu", "kv_transfer"):
            cache = f"{self._folder}/cache:/cache"
            self._engine.podman(
                "run", "--rm", "--network", "none", "--volume", cache, self._images.worker, "python3", "-m", module
            )
        for name in reversed(NODES):
            self.start(name)
        return self

    def __exit__(self, *_: Any) -> None:
        self._engine.podman("rm", "--force", "--ignore", "--time", "0", *NODES)
        self._engine.podman("network", "rm", "--force", NETWORK)

    def start(self, name: str) -> None:
        """As a new machine: with an address that nobody had before."""
        address = next(self._draw)
        if name == "redis":
            self._hosts.write_text(f"127.0.0.1 localhost\n{address} redis\n")
        role, _, index = name.partition("-")
        words = ["run", "--detach", "--name", name, "--network", NETWORK, "--ip", address, "--init"]
        words += [
            "--read-only",
            "--cap-drop",
            "ALL",
            "--security-opt",
            "no-new-privileges",
            "--tmpfs",
            "/tmp:mode=1777",
        ]
        words += ["--volume", f"{self._hosts}:/etc/hosts:ro"]
        if role == "redis":
            command = [SERVICES, "redis-server", "--bind", "*", "--protected-mode", "no", "--save", "", "--dir", "/tmp"]
        else:
            words += ["--volume", f"{self._folder}/cluster.yaml:{_CONFIG}:ro"]
            words += ["--volume", f"{self._folder}/certs:{_CERTS}:ro"]
            command = [self._images.router, "tandem", role, "--config", _CONFIG]
        if name in WORKERS:
            words += ["--volume", f"{self._folder}/cache:/cache", "--env", f"TANDEM_{role.upper()}__HOST={address}"]
            command = [self._images.worker, *command[1:], "--index", index]
        if name in self._killed:
            self._engine.podman("wait", name)  # else podman may find that it ends while it is removed, and fail
            self._killed.discard(name)
        self._engine.podman("rm", "--force", "--ignore", "--time", "0", name)
        self._engine.podman(*words, *command)
        self.addresses[name] = address
        self._pids[name] = int(self._engine.inspect(name)["State"]["Pid"])

    def kill(self, name: str, *, silently: bool) -> None:
        """Its processes end at once; `silently`: so does its network before, so that nobody is told by the kernel."""
        if silently:
            for chain in ("INPUT", "OUTPUT"):
                self._inside(name, *_CHAIN_WAIT, "--append", chain, "--jump", "DROP")
        os.kill(self._pids.pop(name), signal.SIGKILL)
        self._killed.add(name)
        del self.addresses[name]

    def cut(self, one: str, other: str) -> None:
        """Nothing that one sends reaches the other, either way."""
        self._filter("--append", one, other)
        self._cut.add((one, other))

    def heal(self, one: str, other: str) -> None:
        self._filter("--delete", one, other)
        self._cut.discard((one, other))

    def ended(self) -> list[str]:
        """Machines that nobody killed and that run no more, with their last words."""
        gone = [name for name, pid in self._pids.items() if not Path(f"/proc/{pid}").exists()]
        return [f"{name}: {self.log(name)[-500:]}" for name in gone]

    def log(self, name: str) -> str:
        return self._engine.logs(name)

    def router_addresses(self, first: int) -> list[str]:
        """Addresses of gRPC of the routers that are here, beginning at one of them."""
        here = [self.addresses[name] for name in ROUTERS if name in self.addresses]
        return [f"{here[(first + i) % len(here)]}:8001" for i in range(len(here))]

    async def view(self, router: str) -> View:
        """Raises httpx.HTTPError while it does not answer."""
        headers = {"Authorization": f"Bearer {self.key}"}
        base = f"http://{self.addresses[router]}:8000"
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=20.0, trust_env=False) as http:
            answer = await http.get("/status/snapshot")
            answer.raise_for_status()
            metrics = (await http.get("/metrics")).raise_for_status().text
        workers = {worker["id"]: worker for pool in answer.json()["pools"] for worker in pool["workers"]}
        peers = [line.split()[1] for line in metrics.splitlines() if line.startswith("tandem_redis_peer_routers ")]
        return View(workers=workers, num_other_routers=int(float(peers[0])))

    async def leases(self) -> set[str]:
        """Keys of workers and routers that Redis still counts as living."""
        keys = ClusterStateKeys("tandem")
        async with Redis(host=self.addresses["redis"]) as redis:
            marks = [mark.decode() for mark in await redis.zrange(keys.workers, 0, -1)]
            routers = [router.decode() for router in await redis.zrange(keys.routers, 0, -1)]
            named = [keys.notice(Process.parse(mark)) for mark in marks]
            named += [f"{keys.load(0)[:-1]}{router}" for router in routers]  # type: ignore[arg-type]
            return {key for key in named if await redis.exists(key)}

    def _filter(self, change: str, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            if here in self.addresses and there in self.addresses:
                rule = ("INPUT", "--source", self.addresses[there], "--jump", "DROP")
                self._inside(here, *_CHAIN_WAIT, change, *rule)

    def _inside(self, name: str, *command: str) -> None:
        """In the machine's network, where its own processes may change nothing."""
        done = subprocess.run(
            ["nsenter", "--net", "--target", str(self._pids[name]), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {command}: {done.stderr}"

    def _settings(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return {
            "secret": secrets.token_hex(16),
            "cluster": {
                "tls": {"cert": f"{_CERTS}/member.pem", "key": f"{_CERTS}/member.key", "ca": f"{_CERTS}/ca.pem"}
            },
            "engine": {"device": "cpu", "memory_bytes": 1 << 30, "num_threads": 1, "num_blocks": 1600},
            "prefill": {"replicas": 2, "port": 7000},
            "decode": {"replicas": 2, "port": 7000},
            "redis": {"url": "redis://redis:6379"},
            "router": {
                "host": "0.0.0.0",
                "api_keys": [{"key": f"sha256:{digest}", "tenant": "tests", "operator": True}],
                # Here computing is so cheap that routers would often rather have no hand-off.
                "max_local_prefill_tokens": 64,
            },
        }


def pairs(names: Sequence[str] = NODES) -> list[tuple[str, str]]:
    """Any two."""
    return list(itertools.combinations(names, 2))
