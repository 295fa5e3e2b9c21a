"""Workers that publish to a real Redis, and routers that read it: real sessions, no model.

A worker's cache is a bounded set of block names that its answers are true to: what it says was cached was there.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import grpc.aio

from router.admission.shared_rate_limits import SharedRateLimits
from router.cluster_state.redis_tasks import RouterClusterState
from router.dispatch.choices.context import DispatchSettings
from router.dispatch.dispatcher import Dispatcher
from router.fleet.connections import WorkerFleet
from router.fleet.worker_session import SessionSettings
from router.placement.costs import CostModel
from router.placement.placer import Placer
from router.process.admission_setup import make_limits
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.backoff import Backoff
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import ClusterStateCodec, Notice, Process
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.config.cluster import RouterConfig
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels
from tandem.rpc.redis_link import REDIS_BREAKER
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import SECRET, FakeWorker, Submission
from tests.support.redis_server import RedisServer, until
from tests.support.router.cluster import ROOT, collect, routed
from worker.cluster_state.redis_publisher import ClusterStatePublisher
from worker.session_port import orders_of

CAPACITY = 64
QUICK = replace(REDIS_BREAKER, open=Backoff(first_s=0.05, most_s=0.3))


def redis_settings_at(server: RedisServer, **changes: Any) -> RedisSettings:
    """Impatient, so that tests are quick."""
    given = {"host": "127.0.0.1", "port": server.port, "timeout_s": 0.2, "lease_s": 1.0}
    return RedisSettings(**(given | changes))


def names_of(prompt: tuple[int, ...]) -> list[BlockHash]:
    names: list[BlockHash] = []
    BlockHasher(SECRET).extend(ROOT, names, prompt)
    return names


class PublishingWorker(FakeWorker):
    """Any number of routers at once; caches prompts, oldest out first."""

    def __init__(self, worker_id: str, settings: RedisSettings, *, incarnation: int = 1) -> None:
        super().__init__(worker_id, script=self.answer, num_blocks=CAPACITY, incarnation=incarnation)
        self.held: OrderedDict[BlockHash, None] = OrderedDict()
        self.sequence = 0
        self.holding = False
        self.reporting = True
        self.num_running = 0
        self._settings = settings
        self._stack = AsyncExitStack()
        self._queues: set[asyncio.Queue[pb.WorkerMessage]] = set()
        self.publisher: ClusterStatePublisher | None = None

    @property
    def process(self) -> Process:
        return Process(WorkerId(self.worker_id), Incarnation(self.hello.incarnation))

    async def __aenter__(self) -> "PublishingWorker":
        await self.start()
        self.publisher = ClusterStatePublisher(
            Notice(process=self.process, role=WorkerRole.DECODE, address=self.address),
            self._settings,
            ClusterStateCodec(SECRET, self._settings.cluster),
            breaker=CircuitBreaker(QUICK, Random(1)),
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.snapshot()
        await self._stack.enter_async_context(self.publisher)
        self._stack.callback(asyncio.create_task(self._report()).cancel)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._stack.aclose()
        await self.crash()

    def snapshot(self) -> None:
        """All that is held, as the engine's host gives it."""
        assert self.publisher is not None
        self.publisher.send_snapshot(self.sequence, [pb.KVEvent(block_hash=n, stored=True) for n in self.held])

    def store(self, names: list[BlockHash]) -> None:
        """What an engine step would tell."""
        events = []
        for name in names:
            if name in self.held:
                self.held.move_to_end(name)
                continue
            if len(self.held) == CAPACITY:
                gone, _ = self.held.popitem(last=False)
                events.append(pb.KVEvent(block_hash=gone, stored=False))
            self.held[name] = None
            events.append(pb.KVEvent(block_hash=name, stored=True))
        assert self.publisher is not None
        if not self.publisher.send_events(self.sequence, events):
            raise AssertionError("no event was lost")
        self.sequence += len(events)

    async def answer(self, submission: Submission) -> None:
        """Everything at once; `holding`: not yet."""
        self.num_running += 1
        await until(lambda: not self.holding)
        self.num_running -= 1
        names = names_of(tuple(submission.submit.prompt_token_ids))
        cached = next((i for i, name in enumerate(names) if name not in self.held), len(names))
        self.store(names)
        submission.give(submission.tokens, finish=FinishReason.LENGTH, cached=16 * cached)

    def report(self, number: int) -> None:
        """A load report to every router."""
        load = pb.LoadSnapshot(
            num_free_blocks=CAPACITY,
            report_number=number,
            num_running=self.num_running,
            backlog_tokens=100 * self.num_running,
        )
        for queue in self._queues:
            queue.put_nowait(pb.WorkerMessage(load=load))

    async def _report(self) -> None:
        for number in count(1):
            if self.reporting:
                self.report(number)
            await asyncio.sleep(0.1)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._queues.add(outgoing)
        await context.write(pb.WorkerMessage(hello=self.hello))
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = [tasks.create_task(self._carry(outgoing, context))]
                while (message := await context.read()) is not grpc.aio.EOF:
                    for order in orders_of(message):
                        if order.HasField("submit"):
                            submission = Submission(order.submit, outgoing.put_nowait)
                            writing.append(tasks.create_task(self.answer(submission)))
                for task in writing:
                    task.cancel()
        finally:
            self._queues.discard(outgoing)

    async def _carry(self, outgoing: asyncio.Queue[pb.WorkerMessage], context: Any) -> None:
        while True:
            await context.write(await outgoing.get())


class Router:
    """The core of one router process."""

    def __init__(
        self, registry: WorkerRegistry, redis: RouterClusterState, dispatcher: Dispatcher, placer: Placer
    ) -> None:
        self.registry = registry
        self.redis = redis
        self.dispatcher = dispatcher
        self.placer = placer
        self._serial = 0

    async def ask(self, prompt: tuple[int, ...]) -> list[int]:
        """One request to its end."""
        self._serial += 1
        return (await collect(self.dispatcher.generate(routed(prompt, request_id=f"r{self._serial}"))))[0]

    def knows(self, worker: PublishingWorker) -> set[BlockHash]:
        """Names that the router thinks the worker holds because it said so."""
        known = self.registry.prefix_map._workers.get(worker.process.worker_id)
        return set() if known is None else set(known.known)

    def agrees_with(self, *workers: PublishingWorker) -> bool:
        """Whether it knows exactly what they hold."""
        return all(self.knows(worker) == set(worker.held) for worker in workers)

    async def crash(self) -> None:
        """As the kernel does it: connections end, nobody cleans up."""
        for task in self.redis._tasks:
            task.cancel()
        await asyncio.wait(self.redis._tasks)
        await self.redis._logs.close()
        await self.redis._poll.close()


@asynccontextmanager
async def router(
    number: int, settings: RedisSettings, *, live: int, limits: SharedRateLimits | None = None
) -> AsyncIterator[Router]:
    """Finds the workers in Redis; waits until `live` of them are connected."""
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=time.monotonic)
    incarnation = Incarnation(1000 + number)
    limits = make_limits(RouterConfig(), SECRET, time.monotonic) if limits is None else limits
    redis = RouterClusterState(
        settings, secret=SECRET, router=incarnation, registry=registry, limits=limits, stated=frozenset()
    )
    for link in (redis._logs, redis._poll):
        link._breaker = CircuitBreaker(QUICK, Random(number))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(redis)
        fleet = WorkerFleet(
            directory=redis.directory,
            listener=registry,
            open_channel=ClusterChannels(None).open,
            connect=ClusterChannels(None).connect,
            settings=SessionSettings(
                metadata=ClusterAuth(SECRET).client_metadata(),
                incarnation=incarnation,
                silence_s=60.0,
                reads_redis=True,
            ),
            rng=Random(number),
            backoff=Backoff(first_s=0.02, most_s=0.1),
        )
        await stack.enter_async_context(fleet)
        await until(lambda: len(registry.snapshots()) == live, "the workers joined")
        placer = Placer(registry=registry, model=CostModel(), rng=Random(number), clock=time.monotonic)
        dispatcher = Dispatcher(
            placer=placer,
            hasher=BlockHasher(SECRET),
            settings=DispatchSettings(),
            clock=time.monotonic,
            rng=Random(number),
        )
        yield Router(registry, redis, dispatcher, placer)
