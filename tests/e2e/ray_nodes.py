"""A Ray cluster of several nodes on this machine: `python -m tests.e2e.ray_nodes`, told what to do line by line.

In a process of its own: Ray starts threads, handles signals and warns of things, which are none of the tests' business.
"""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES = 2
STORE_BYTES = 80 << 20
"""The least that Ray takes; nothing is stored in it."""
CPUS = 8
"""Of each node, as far as Ray knows."""
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A dead node is noticed after 15 s unless told otherwise.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    # No processes for tasks that nobody will have.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(slots=True)
class RayNodes:
    """The cluster as tests see it."""

    process: asyncio.subprocess.Process
    address: str
    session: Path
    """Where Ray writes, logs among others."""
    environment: dict[str, str]
    """For whoever is to find its way in: with the token."""

    async def kill_one(self) -> list[str]:
        """Kill the node that runs most workers, as if its machine had lost power; which workers ran there."""
        told = await self._ask("kill")
        return told["had"]

    async def workers(self) -> list[int]:
        """Pids of those that run on any node."""
        told = await self._ask("workers")
        return told["had"]

    async def _ask(self, what: str) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        await self.process.stdin.drain()
        return await _answer(self.process)


@asynccontextmanager
async def ray_nodes() -> AsyncIterator[RayNodes]:
    """A head without processors, and two nodes."""
    environment = os.environ | SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(16)}
    environment.pop("RAY_ADDRESS", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.ray_nodes",
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        told = await _answer(process)
        yield RayNodes(process, told["address"], Path(told["session"]), environment)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> dict:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the Ray cluster has ended"
    return json.loads(line)


def main() -> None:
    """Until the pipe ends."""
    from ray.cluster_utils import Cluster

    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(wait=False, num_cpus=CPUS, object_store_memory=STORE_BYTES) for _ in range(NODES)]
        cluster.wait_for_nodes()
        session = cluster.head_node.get_session_dir_path()
        say.write(json.dumps({"address": cluster.address, "session": session}) + "\n")
        for order in sys.stdin:
            if order.strip() == "workers":
                say.write(json.dumps({"had": sorted(pid for node in nodes for pid in workers_of(node))}) + "\n")
                continue
            busiest = max(nodes, key=lambda node: len(workers_of(node)))
            had = sorted(workers_of(busiest).values())
            nodes.remove(busiest)
            cluster.remove_node(busiest, allow_graceful=False)
            say.write(json.dumps({"had": had}) + "\n")
    finally:
        cluster.shutdown()


def workers_of(node: object) -> dict[int, str]:
    """Processes of ours that descend from a node's, by pid."""
    found = {}
    for infos in node.all_processes.values():  # type: ignore[attr-defined]
        for info in infos:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(info.process.pid).children(recursive=True):
                    if (name := worker_name(child)) is not None:
                        found[child.pid] = name
    return found


def worker_name(process: psutil.Process) -> str | None:
    """decode-1, of a process that is one; of its ranks it is the parent's."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        for role in ("prefill", "decode"):
            if f"{role}_worker" in words and "--index" in words:
                return f"{role}-{words[words.index('--index') + 1]}"
    return None


if __name__ == "__main__":
    main()
