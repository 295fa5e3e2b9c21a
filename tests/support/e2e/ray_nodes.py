"""A Ray cluster of several nodes on this machine: `python -m tests.support.e2e.ray_nodes`, told what to do line by
line.

In a process of its own: Ray starts threads, handles signals and warns of things, which are none of the tests' business.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NODES = 2
STORE_BYTES = 80 << 20
"""The least that Ray takes; nothing is stored in it."""
NODE = {"num_cpus": 8, "object_store_memory": STORE_BYTES}
"""As far as Ray knows."""
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # No processes for tasks that nobody will have.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
QUICK = {
    # Ray's default is to notice a dead node after 15 s.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "2",
}


@dataclass(slots=True)
class RayNodes:
    """The cluster as tests see it."""

    process: asyncio.subprocess.Process
    address: str
    session: Path
    """Where Ray writes, logs among others."""
    environment: dict[str, str]
    """Environment of a process that is to join: with the token."""

    async def kill_one(self) -> list[str]:
        """End every process of the node that runs most workers; which workers ran there. Their peers hear of it."""
        return sorted((await self._ask("kill")).values())

    async def freeze_node(self) -> dict[int, str]:
        """Stop every process of that node: nobody hears anything of it, as of a machine that is cut off."""
        return await self._ask("still")

    async def freeze_head(self) -> None:
        """Stop what every node and driver asks where things are; nodes and what runs on them go on."""
        await self._ask("still the head")

    async def add_node_with(self, resource: str) -> None:
        """One more node, which has one of this."""
        await self._ask(f"add {resource}")

    async def go_on(self) -> None:
        """Those that were stopped run again."""
        await self._ask("go on")

    async def workers(self) -> dict[int, str]:
        """Those that run on any node, by pid."""
        return await self._ask("workers")

    async def _ask(self, what: str) -> dict[int, str]:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        await self.process.stdin.drain()
        return {int(pid): name for pid, name in (await _answer(self.process)).items()}


@asynccontextmanager
async def ray_nodes(*, is_quick: bool = True) -> AsyncIterator[RayNodes]:
    """A head without processors, and two nodes. `is_quick`: Ray notices a dead one within a second."""
    settings = SETTINGS | (QUICK if is_quick else {})
    environment = os.environ | settings | {"RAY_AUTH_TOKEN": secrets.token_hex(16)}
    environment.pop("RAY_ADDRESS", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.e2e.ray_nodes",
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        answer = await _answer(process)
        yield RayNodes(process, answer["address"], Path(answer["session"]), environment)
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
    stopped: list[psutil.Process] = []
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(wait=False, **NODE) for _ in range(NODES)]
        cluster.wait_for_nodes()
        session = cluster.head_node.get_session_dir_path()
        say.write(json.dumps({"address": cluster.address, "session": session}) + "\n")
        for order in sys.stdin:
            had = workers_of(*nodes)
            busiest = max(nodes, key=lambda node: len(workers_of(node)))
            match order.split():
                case ["add", resource]:
                    nodes.append(cluster.add_node(resources={resource: 1}, **NODE))
                case ["kill"]:
                    had = workers_of(busiest)
                    nodes.remove(busiest)
                    cluster.remove_node(busiest, allow_graceful=False)
                case ["still"]:
                    had = workers_of(busiest)
                    stopped = processes_of(busiest)
                    signal_all(stopped, signal.SIGSTOP)
                case ["still", "the", "head"]:
                    stopped = [psutil.Process(one.process.pid) for one in cluster.head_node.all_processes["gcs_server"]]
                    signal_all(stopped, signal.SIGSTOP)
                case ["go", "on"]:
                    signal_all(stopped, signal.SIGCONT)
            say.write(json.dumps(had) + "\n")
    finally:
        signal_all(stopped, signal.SIGCONT)  # or they would not hear that they are to end
        cluster.shutdown()


def processes_of(*nodes: Any) -> list[psutil.Process]:
    """Those of nodes, and all that descend from them."""
    found = []
    for infos in (infos for node in nodes for infos in node.all_processes.values()):
        for info in infos:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def signal_all(processes: list[psutil.Process], signum: signal.Signals) -> None:
    """Those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def workers_of(*nodes: Any) -> dict[int, str]:
    """Processes of ours that run on nodes, by pid."""
    named = {process.pid: worker_name(process) for process in processes_of(*nodes)}
    return {pid: name for pid, name in named.items() if name is not None}


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
