"""`python -m tandem_bench.scale.mock_workers ...`: many decode workers without a model, in one process.

Each has a server, sessions and an entry in Redis of its own, made of the workers' own classes; only the engine is
missing (`MockWorker`). SIGTERM makes all of them leave at once, as workers do: they refuse what is new, and close when
their requests have ended, or after `--drain-s`. Each second a line of JSON tells how many sessions
and requests there are.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import uvloop

from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import ClusterStateCodec, Notice, Process
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.cluster_grpc import ClusterAuth, make_server, open_port
from tandem.rpc.redis_link import REDIS_BREAKER
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tandem_bench.router.mock_worker import MockWorker
from worker.cluster_state.redis_publisher import ClusterStatePublisher
from worker.direct_port import open_direct_port
from worker.sessions import WorkerSessions

_HOST = "127.0.0.1"
_REPORT_S = 1.0


class HostedWorker:
    """One of the workers, from its registration to its leaving."""

    def __init__(self, worker: MockWorker, sessions: WorkerSessions, stack: AsyncExitStack) -> None:
        """`stack`: closes its ports, and removes it from Redis."""
        self.worker = worker
        self.sessions = sessions
        self._stack = stack

    async def leave(self, drain_s: float) -> None:
        """Refuse new requests, and end when those that run have ended, or after `drain_s`."""
        self.worker.is_draining = True
        self.sessions.drain("leaving")
        ends_s = time.monotonic() + drain_s
        while self.worker.num_running and time.monotonic() < ends_s:  # noqa: ASYNC110  # polls
            await asyncio.sleep(0.1)
        await self.sessions.end()
        await self._stack.aclose()


async def open_worker(index: int, options: argparse.Namespace, tasks: asyncio.TaskGroup) -> HostedWorker:
    """Open one worker's ports, and register it in Redis. Raises OSError."""
    secret, stack = options.secret.encode(), AsyncExitStack()
    worker = MockWorker(
        index=index,
        vocab_size=options.vocab_size,
        model_name=options.model,
        step_s=options.step_s,
        token_ids=options.says,
        secret=secret,
    )
    server = make_server(ClusterAuth(secret))
    port = await open_port(stack, server, _HOST, 0, None)
    identity = worker.hello()
    settings = RedisSettings(host=_HOST, port=options.redis_port)
    process = Process(WorkerId(identity.worker_id), Incarnation(identity.incarnation))
    publisher = ClusterStatePublisher(
        Notice(process=process, role=WorkerRole.DECODE, address=f"{_HOST}:{port}"),
        settings,
        ClusterStateCodec(secret, settings.cluster),
        breaker=CircuitBreaker(REDIS_BREAKER, Random(index)),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    sessions = WorkerSessions(worker, publisher, await open_direct_port(stack, _HOST, None))
    worker.sinks = lambda: sessions.event_sinks
    sessions.register(server)
    await server.start()
    stack.push_async_callback(server.stop, None)
    worker.send_snapshot(publisher)
    await stack.enter_async_context(publisher)
    for work in (sessions.send_loads(), worker.run()):
        stack.callback(tasks.create_task(work).cancel)
    return HostedWorker(worker, sessions, stack)


async def _report(workers: Sequence[HostedWorker]) -> None:
    while True:
        sessions = sum(len(one.sessions.ports) for one in workers)
        requests = sum(one.worker.num_running for one in workers)
        sys.stdout.write(json.dumps({"workers": len(workers), "sessions": sessions, "requests": requests}) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(_REPORT_S)


async def _serve(options: argparse.Namespace) -> None:
    has_to_leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, has_to_leave.set)
    async with asyncio.TaskGroup() as tasks:
        workers: list[HostedWorker] = []
        reporting = tasks.create_task(_report(workers))
        for index in range(options.first, options.first + options.count):
            workers.append(await open_worker(index, options, tasks))
        await has_to_leave.wait()
        await asyncio.gather(*(one.leave(options.drain_s) for one in workers))
        reporting.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.scale.mock_workers", description=__doc__)
    parser.add_argument("--first", type=int, required=True, help="number of the first worker")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--redis-port", type=int, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model", default="tandem-tiny")
    parser.add_argument("--step-s", type=float, required=True, help="time of a token of every stream")
    parser.add_argument("--drain-s", type=float, required=True)
    parser.add_argument("--says", type=int, nargs="+", required=True, help="token ids that every answer repeats")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
