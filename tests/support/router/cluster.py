"""A router core over fake workers: the real registry, fleet, placer and dispatcher, real sockets between."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

from router.dispatch.choices.context import DispatchSettings
from router.dispatch.dispatcher import Dispatcher
from router.fleet.connections import WorkerFleet
from router.fleet.native_streams import NativeStreams
from router.fleet.worker_session import SessionSettings
from router.placement.costs import CostModel
from router.placement.placer import Placer
from router.types.requests import ChoiceDelta, RoutedRequest
from router.types.session_events import WorkerPort
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.backoff import Backoff
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels
from tandem.rpc.worker_directory import ChangingDirectory, stated_addresses
from tandem.telemetry.tracing import Span
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import Incarnation, RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tests.support.fake_worker import SECRET, FakeWorker

ROOT = root_hash(secret=SECRET, model_fingerprint="model-a")
PROMPT = tuple(range(100, 112))
LONG_PROMPT = tuple(range(100, 300))


class WatchedRegistry(WorkerRegistry):
    """Lets a test wait for what sessions report."""

    def __init__(self, prefix_map: PrefixMap | None = None) -> None:
        super().__init__(prefix_map=PrefixMap() if prefix_map is None else prefix_map, clock=time.monotonic)
        self.num_left = 0
        self._reported = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._reported.clear()
            await self._reported.wait()

    async def until_live(self, count: int) -> None:
        await self.until(lambda: len(self.snapshots()) == count)

    def joined(self, info: WorkerInfo, port: WorkerPort) -> None:
        super().joined(info, port)
        self._reported.set()

    def left(self, key: WorkerKey, reason: str) -> None:
        super().left(key, reason)
        self.num_left += 1
        self._reported.set()

    def load_changed(self, key: WorkerKey, load: WorkerLoad) -> None:
        super().load_changed(key, load)
        self._reported.set()

    def prefix_changed(self, key: WorkerKey, change: PrefixChange) -> None:
        super().prefix_changed(key, change)
        self._reported.set()

    def draining(self, key: WorkerKey, reason: str) -> None:
        super().draining(key, reason)
        self._reported.set()


class Observed:
    """Collects what dispatch tells its observer."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.retries: list[str] = []

    def placed(self, mode: str) -> None:
        self.modes.append(mode)

    def retried(self, reason: str) -> None:
        self.retries.append(reason)


class Cluster:
    """What a test looks at."""

    def __init__(self, registry: WatchedRegistry, dispatcher: Dispatcher, observed: Observed) -> None:
        self.registry = registry
        self.dispatcher = dispatcher
        self.observed = observed

    def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        return self.dispatcher.generate(request)

    def assert_idle(self) -> None:
        """No request in the books."""
        assert self.dispatcher.num_inflight == 0
        for worker in self.registry.snapshots():
            record = self.registry._workers[worker.info.key.worker_id]
            assert (record.own_backlog, record.num_assigned) == (0, 0)


def session_settings(**changes: float) -> SessionSettings:
    return SessionSettings(
        metadata=ClusterAuth(SECRET).client_metadata(),
        incarnation=Incarnation(5),
        hello_timeout_s=changes.get("hello_timeout_s", 5.0),
        silence_s=changes.get("silence_s", 30.0),
    )


def fleet_of(*workers: FakeWorker, registry: WorkerRegistry, settings: SessionSettings | None = None) -> WorkerFleet:
    return WorkerFleet(
        directory=ChangingDirectory(
            stated_addresses(
                prefill=[w.address for w in workers if w.role is WorkerRole.PREFILL],
                decode=[w.address for w in workers if w.role is WorkerRole.DECODE],
            )
        ),
        listener=registry,
        open_channel=ClusterChannels(None).open,
        connect=ClusterChannels(None).connect,
        settings=settings or session_settings(),
        rng=Random(1),
        backoff=Backoff(first_s=0.02, most_s=0.1),
        expected=registry.expected,
    )


@asynccontextmanager
async def cluster(
    *workers: FakeWorker,
    settings: DispatchSettings | None = None,
    new_native_streams: Callable[[], NativeStreams] | None = None,
) -> AsyncIterator[Cluster]:
    """Start the workers and a router over them, and wait until they have met."""
    session = replace(session_settings(), new_native_streams=new_native_streams)
    registry = WatchedRegistry()
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        await stack.enter_async_context(fleet_of(*workers, registry=registry, settings=session))
        await registry.until_live(len(workers))
        observed = Observed()
        placer = Placer(registry=registry, model=CostModel(), rng=Random(2), clock=time.monotonic)
        dispatcher = Dispatcher(
            placer=placer,
            hasher=BlockHasher(SECRET),
            settings=settings or DispatchSettings(),
            clock=time.monotonic,
            rng=Random(3),
            observer=observed,
        )
        yield Cluster(registry, dispatcher, observed)


def routed(
    prompt: tuple[int, ...] = PROMPT,
    *,
    request_id: str = "r1",
    max_tokens: int = 8,
    seed: int = 3,
    n: int = 1,
    deadline_s: float | None = None,
    priority: int = 0,
    span: Span | None = None,
) -> RoutedRequest:
    return RoutedRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
        hash_root=ROOT,
        num_choices=n,
        deadline_s=deadline_s,
        priority=priority,
        span=span,
    )


async def collect(stream: AsyncIterator[ChoiceDelta]) -> dict[int, list[int]]:
    """Token ids per choice."""
    tokens: dict[int, list[int]] = {}
    async for delta in stream:
        tokens.setdefault(delta.choice_index, []).extend(t.token_id for t in delta.tokens)
    return tokens
