"""Cost of Redis for a router's requests, while it works and while it fails, and the time until all is known again.

A placement is due every two milliseconds. `added_p99`: how late it is done (including the wait for the event loop) at
the 99th percentile, beyond the same without shared state. `added_cpu_p99`: the same in processor time of the router's
thread, from the moment when the placement could run until it is done: what delays it in the event loop, which on a busy
machine is more meaningful than the clock. A separate process plays the workers: each publishes what a busy one would.
`known_again`: from Redis's return until a router knows everything that workers have stored meanwhile, which is when its
hit rate is back.

`python -m tandem_bench.router.redis` prints both; it needs a redis-server (included in the dev dependencies).
"""

import argparse
import asyncio
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from router.cluster_state.redis_tasks import RouterClusterState
from router.placement.costs import CostModel
from router.placement.placer import Placer
from router.process.admission_setup import make_limits
from router.types.worker_view import WorkerInfo, WorkerKey
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import ClusterStateCodec, Notice, Process
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.config.cluster import RouterConfig
from tandem.rpc.redis_link import REDIS_BREAKER
from tandem.rpc.worker_directory import WorkerAddress
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.roles import WorkerRole
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure, print_table
from worker.cluster_state.redis_publisher import ClusterStatePublisher

NUM_WORKERS = 16
NUM_BLOCKS = 10_000
STEP_S = 0.02
"""Duration of a worker's step; each step stores a prompt's worth of blocks and evicts as many."""
BLOCKS_A_STEP = 8
_EVERY_S = 0.002
_ROUND_S = 1.0
_SECRET = b"a secret of the benchmark"
_LAYOUT = KVLayout(model_fingerprint="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
_Deed = Callable[["RedisServer"], Awaitable[None]]
_FAULTS: dict[str, _Deed]


class RedisServer:
    """Redis server that can be made to fail."""

    def __init__(self) -> None:
        binary = Path(sys.executable).with_name("redis-server")
        found = str(binary) if binary.is_file() else shutil.which("redis-server")
        if found is None:
            raise CannotMeasure("redis-server is not installed: install the dev dependencies, or Debian's package")
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.port = int(held.getsockname()[1])
        self._command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = self._start()

    async def start(self) -> None:
        self.process = await asyncio.to_thread(self._start)

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    async def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    async def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def say(self, line: str) -> None:
        """Send one command and ignore the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{line}\r\n".encode())
        await reader.readline()
        writer.close()

    def settings(self) -> RedisSettings:
        return RedisSettings(host="127.0.0.1", port=self.port)


async def _flush_often(server: RedisServer) -> None:
    for _ in range(2):
        await server.say("FLUSHALL")
        await asyncio.sleep(_ROUND_S / 2)


def _process(number: int) -> Process:
    return Process(WorkerId(f"decode-{number}"), Incarnation(1 + number))


def _name(worker: int, block: int) -> BlockHash:
    return BlockHash(blake2b(b"%d %d" % (worker, block), digest_size=16).digest())


class _Worker:
    """Publishes events of one worker; its cache is full, so that every store evicts."""

    def __init__(self, number: int, settings: RedisSettings) -> None:
        self._number = number
        self.newest = NUM_BLOCKS
        self._sequence = 0
        self.publisher = ClusterStatePublisher(
            Notice(process=_process(number), role=WorkerRole.DECODE, address="127.0.0.1:1"),
            settings,
            ClusterStateCodec(_SECRET, settings.cluster),
            breaker=CircuitBreaker(REDIS_BREAKER, Random(number)),
            clock=time.monotonic,
            wall_clock=time.time,
        )
        names = [pb.KVEvent(block_hash=_name(number, block), stored=True) for block in range(NUM_BLOCKS)]
        self.publisher.send_snapshot(0, names)

    def step(self, num_blocks: int = BLOCKS_A_STEP) -> None:
        events = []
        for block in range(self.newest, self.newest + num_blocks):
            events.append(pb.KVEvent(block_hash=_name(self._number, block - NUM_BLOCKS), stored=False))
            events.append(pb.KVEvent(block_hash=_name(self._number, block), stored=True))
        self.publisher.send_events(self._sequence, events)
        self._sequence += len(events)
        self.newest += num_blocks


async def _play_workers(port: int) -> None:
    """Play the workers in the other process, until it is killed."""
    settings = RedisSettings(host="127.0.0.1", port=port)
    async with AsyncExitStack() as stack:
        workers = [_Worker(number, settings) for number in range(NUM_WORKERS)]
        for worker in workers:
            await stack.enter_async_context(worker.publisher)
        while True:
            for worker in workers:
                worker.step()
                await asyncio.sleep(STEP_S / NUM_WORKERS)


class _NoPort:
    """Accepts all calls of a WorkerPort and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_named: None


def _registry(num_workers: int) -> WorkerRegistry:
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=time.monotonic)
    for number in range(num_workers):
        info = WorkerInfo(
            key=WorkerKey(*_process(number)),
            role=WorkerRole.DECODE,
            model_name="m",
            max_model_len=1 << 20,
            num_blocks=NUM_BLOCKS,
            layout=_LAYOUT,
        )
        port: Any = _NoPort()
        registry.joined(info, port)
    return registry


@asynccontextmanager
async def _cluster_state(registry: WorkerRegistry, settings: RedisSettings) -> AsyncIterator[RouterClusterState]:
    stated: frozenset[WorkerAddress] = frozenset()
    limits = make_limits(RouterConfig(), _SECRET, time.monotonic)
    state = RouterClusterState(
        settings, secret=_SECRET, router=Incarnation(9), registry=registry, limits=limits, stated=stated
    )
    async with state:
        yield state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """99th percentiles over one round, in milliseconds."""

    wall_ms: float
    cpu_ms: float


def _best(found: Sequence[_Late]) -> _Late:
    return _Late(wall_ms=min(each.wall_ms for each in found), cpu_ms=min(each.cpu_ms for each in found))


async def _round(registry: WorkerRegistry) -> _Late:
    placer = Placer(registry=registry, model=CostModel(), rng=Random(1), clock=time.monotonic)
    prompts = [[_name(worker, block) for block in range(64)] for worker in range(NUM_WORKERS)]
    wall: list[float] = []
    cpu: list[float] = []
    due = time.perf_counter()
    for turn in range(int(_ROUND_S / _EVERY_S)):
        # Not faster than the machine allows: a backlog would be counted repeatedly.
        due = max(due + _EVERY_S, time.perf_counter() - _EVERY_S)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        begun = time.thread_time()
        await asyncio.sleep(0)
        placer.release(placer.assign(num_tokens=1024, names=prompts[turn % NUM_WORKERS]))
        wall.append((time.perf_counter() - due) * 1e3)
        cpu.append((time.thread_time() - begun) * 1e3)
    return _Late(wall_ms=sorted(wall)[len(wall) * 99 // 100], cpu_ms=sorted(cpu)[len(cpu) * 99 // 100])


async def _latency_rows(rounds: int) -> AsyncIterator[Row]:
    for fault, begin in _FAULTS.items():
        server = RedisServer()
        command = [sys.executable, "-m", "tandem_bench.router.redis", "--play-workers", str(server.port)]
        players = await asyncio.create_subprocess_exec(*command)
        try:
            # With the same background load: the machine time of the workers' process is not a cost of the shared state.
            alone = _best([await _round(_registry(NUM_WORKERS)) for _ in range(rounds)])
            registry = _registry(NUM_WORKERS)
            async with _cluster_state(registry, server.settings()) as state:
                async with asyncio.timeout(60.0):
                    while state.num_followed < NUM_WORKERS:  # noqa: ASYNC110  # there is no event for this
                        await asyncio.sleep(0.05)
                found = []
                for _ in range(rounds):
                    under_way = asyncio.ensure_future(begin(server))
                    found.append(await _round(registry))
                    await under_way
        finally:
            players.kill()
            await players.wait()
            await server.kill()
        best = _best(found)
        if fault == next(iter(_FAULTS)):
            yield figure("redis.p99.none", alone.wall_ms, "ms")
            yield figure("redis.cpu_p99.none", alone.cpu_ms, "ms")
        yield figure(f"redis.added_p99.{fault}", max(0.0, best.wall_ms - alone.wall_ms), "ms", at_most=5.0)
        yield figure(f"redis.added_cpu_p99.{fault}", max(0.0, best.cpu_ms - alone.cpu_ms), "ms", at_most=5.0)


async def _known_again_s(begin: _Deed, end: _Deed) -> float:
    server = RedisServer()
    try:
        async with AsyncExitStack() as stack:
            workers = [_Worker(number, server.settings()) for number in range(4)]
            for worker in workers:
                await stack.enter_async_context(worker.publisher)
            registry = _registry(4)
            await stack.enter_async_context(_cluster_state(registry, server.settings()))

            async def until_known() -> None:
                for number, worker in enumerate(workers):
                    newest = [_name(number, worker.newest - 1)]
                    while not registry.prefix_map.longest_prefix(newest):  # noqa: ASYNC110 - as above
                        await asyncio.sleep(0.01)

            async with asyncio.timeout(60.0):
                await until_known()
                await begin(server)
                for _ in range(100):
                    for worker in workers:
                        worker.step()
                    await asyncio.sleep(0.05)
                await end(server)
                begun = time.perf_counter()
                await until_known()
                return time.perf_counter() - begun
    finally:
        await server.kill()


async def _nothing(_: RedisServer) -> None: ...


_FAULTS = {
    "well": _nothing,
    "flushed": _flush_often,
    "read_only": lambda server: server.say("REPLICAOF 127.0.0.1 1"),
    "hung": RedisServer.hang,
    "killed": RedisServer.kill,
}


async def _measure(rounds: int) -> list[Row]:
    rows = [row async for row in _latency_rows(rounds)]
    endings = {"killed": (RedisServer.kill, RedisServer.start), "hung": (RedisServer.hang, RedisServer.go_on)}
    for fault, (begin, end) in endings.items():
        rows.append(figure(f"redis.known_again.{fault}", await _known_again_s(begin, end), "s", at_most=10.0))
    return rows


def rows(repeats: int) -> list[Row]:
    """Measure every figure; the best of `repeats` rounds, at most three, counts. Raises CannotMeasure."""
    with ThreadPoolExecutor(1) as pool:  # may be called while an event loop runs
        return pool.submit(asyncio.run, _measure(min(3, repeats))).result()


def main() -> None:
    """Print the figures, or play the workers."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.router.redis", description="What Redis costs requests."
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--play-workers", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("router.cluster_state").setLevel(logging.CRITICAL)  # Redis fails on purpose here
    if options.play_workers is not None:
        asyncio.run(_play_workers(options.play_workers))
    else:
        print_table(Console(highlight=False, width=120), rows(options.repeats))


if __name__ == "__main__":
    main()
