"""The whole router but its servers, over workers that are in the same process and do what dice say.

Registry, prefix map, placement, dispatch, gate, admission and metrics are the real ones, on a clock that a test moves.
Nothing waits for a socket, so tens of thousands of requests take seconds.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Any

from msgspec.structs import replace

from router.admission.rate_limits import RateLimiter
from router.dispatch.choices.context import DispatchSettings, HedgingSettings
from router.dispatch.dispatcher import Dispatcher
from router.fleet.readiness import ReadinessCheck
from router.metrics.router_metrics import RouterMetrics
from router.placement.costs import CostModel
from router.placement.decision_log import DecisionLog
from router.placement.placer import Placer
from router.placement.prefix_replication import ReplicationPolicy
from router.process.admission_setup import make_admission_queue
from router.types.requests import ChoiceDelta, DeltaSink, RoutedRequest
from router.types.session_events import (
    AttemptFinished,
    AttemptReader,
    AttemptRefused,
    AttemptStarted,
    CacheOffer,
    CommittedHandoff,
    MigrationPlan,
    PrefillRoute,
    SubmitOrder,
    TokensArrived,
    TransferFailed,
    WorkerLost,
)
from router.types.worker_view import PrefixChange, WorkerKey, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.config.cluster import ClusterConfig, QueueConfig, RouterConfig
from tandem.errors import InternalError, Overloaded, ServingError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, Incarnation, RequestId, WorkerId
from tandem.values.outputs import FinishReason, PhaseTimes, SampledToken
from tandem.values.prefix_pin import PinKey, PinOrder
from tandem.values.sampling import SamplingParams
from tests.support.fake_worker import SECRET
from tests.support.router.cluster import ROOT
from tests.support.router.worker_views import worker

TENANTS = ("a", "b", "c")
NUM_BLOCKS = 64
MAX_INFLIGHT = 64
_TURNS_PER_REPORT = 4
_EXPECTATIONS_LAPSE_S = 31.0


class Fate(Enum):
    """What becomes of an attempt on its worker."""

    ANSWER = "answer"
    HANG = "hang"
    STOP_SHORT = "stop_short"
    """One token, and no more."""
    FULL = "full"
    BROKEN = "broken"
    TRANSFER_FAILS = "transfer_fails"


class PortWorker:
    """One worker; a `router.types.session_events.WorkerPort`."""

    def __init__(self, name: str, whole: "WholeRouter") -> None:
        self.name = name
        self._whole = whole
        self.live: dict[RequestId, tuple[SubmitOrder, AttemptReader]] = {}
        self._held: OrderedDict[BlockHash, None] = OrderedDict()
        self._sequence = 0
        self._life = 0
        self.join()

    def join(self) -> None:
        """A new process, with nothing cached."""
        self._life += 1
        self._sequence = 0
        info = worker(self.name, num_blocks=NUM_BLOCKS).info
        self.info = replace(info, key=WorkerKey(WorkerId(self.name), Incarnation(self._life)))
        self._whole.registry.joined(self.info, self)
        change = PrefixChange(first_sequence=0, snapshot=True, changes=())
        self._whole.registry.prefix_changed(self.info.key, change)
        self.report()

    def leave(self, *, on_request: bool) -> None:
        """Leave in the middle of everything; `on_request`: after a drain was requested."""
        registry, key = self._whole.registry, self.info.key
        if on_request:
            registry.draining(key, "told to")
            registry.cache_offered(key, CacheOffer(chains=(), lends_s=1.0))
        registry.left(key, "gone")
        lost, self.live = self.live, {}
        self._held.clear()
        for _, reader in lost.values():
            reader.on_event(WorkerLost(reason="gone"))

    def report(self) -> None:
        """Say that there is room."""
        load = WorkerLoad(num_free_blocks=NUM_BLOCKS, prefill_tokens_per_s=1e4, num_running=len(self.live))
        self._whole.registry.load_changed(self.info.key, load)

    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None:
        self.live[order.request_id] = (order, reader)
        asyncio.get_running_loop().call_soon(self._act, order, self._whole.draw())

    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, reader: AttemptReader) -> None:
        raise AssertionError("nobody continues a stream here")

    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None:
        if (known := self.live.get(request_id)) is not None and known[0].attempt == attempt:
            asyncio.get_running_loop().call_soon(self._act, known[0], Fate.ANSWER)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        if (known := self.live.get(request_id)) is not None and known[0].attempt == attempt:
            del self.live[request_id]

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None:
        """Do nothing: this worker takes no cache over."""

    def end_migration(self) -> None:
        """Do nothing: no migration has begun."""

    def pin(self, order: PinOrder) -> None:
        """Nobody asks for one."""

    def unpin(self, key: PinKey) -> None:
        """Nobody asks for one."""

    def resync(self) -> None:
        """It tells everything unasked."""

    def _act(self, order: SubmitOrder, fate: Fate) -> None:
        known = self.live.get(order.request_id)
        if known is None or known[0] is not order:
            return
        reader = known[1]
        match fate:
            case Fate.ANSWER | Fate.STOP_SHORT:
                self._say(order, reader, 0)
                if fate is Fate.ANSWER:
                    asyncio.get_running_loop().call_soon(self._end, order)
            case Fate.FULL:
                self._refuse(order, reader, Overloaded("full", retry_after_s=0.05))
            case Fate.BROKEN:
                self._refuse(order, reader, InternalError("out of order"))
            case Fate.TRANSFER_FAILS:
                if order.prefill is None:
                    self._refuse(order, reader, InternalError("out of order"))
                else:
                    transfer_id = order.prefill.transfer_id
                    reader.on_event(
                        TransferFailed(transfer_id=transfer_id, landed_tokens=0, reason="the peer was lost")
                    )

    def _refuse(self, order: SubmitOrder, reader: AttemptReader, error: ServingError) -> None:
        del self.live[order.request_id]
        reader.on_event(AttemptRefused(error=error))

    def _say(self, order: SubmitOrder, reader: AttemptReader, index: int, *, last: bool = False) -> None:
        started = AttemptStarted(cached_tokens=0, times=PhaseTimes())
        finished = AttemptFinished(reason=FinishReason.LENGTH, cached_tokens=0, times=PhaseTimes())
        token = SampledToken(token_id=index)
        first_index = len(order.generated_token_ids) + index
        # Most tokens come with nothing else, as from a real session.
        if index and not last:
            reader.on_token(first_index, token.token_id)
        else:
            reader.on_event(TokensArrived(first_index, (token,), None if last else started, finished if last else None))

    def _end(self, order: SubmitOrder) -> None:
        known = self.live.get(order.request_id)
        if known is None or known[0] is not order:
            return
        del self.live[order.request_id]
        if order.prefill is not None:
            handoff = CommittedHandoff(prefill=order.prefill.worker, num_tokens=16, exposed_s=0.001)
            self._whole.registry.handoff_committed(self.info.key, handoff)
        self._say(order, known[1], 1, last=True)
        for one in self._whole.workers:
            if one is self or (order.prefill is not None and one.info.key == order.prefill.worker):
                one._cache(order)

    def _cache(self, order: SubmitOrder) -> None:
        """What it has now, and what had to go for it, as events."""
        names: list[BlockHash] = []
        self._whole.hasher.extend(order.hash_root, names, order.prompt_token_ids)
        changes = [(name, True) for name in names if name not in self._held]
        self._held |= dict.fromkeys(names)
        while len(self._held) > NUM_BLOCKS:
            changes.append((self._held.popitem(last=False)[0], False))
        change = PrefixChange(first_sequence=self._sequence, snapshot=False, changes=tuple(changes))
        self._sequence += len(changes)
        self._whole.registry.prefix_changed(self.info.key, change)


class Listener(DeltaSink):
    """A client that reads whatever comes."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self.num_tokens += len(delta.tokens)
        return False

    async def ready(self) -> None:
        raise AssertionError("it is never slow")


class WholeRouter:
    """All parts, as `router.__main__` puts them together."""

    def __init__(self, seed: int, *, num_decode: int = 3, num_prefill: int = 2, names: Sequence[str] = ()) -> None:
        """`names`: of more workers."""
        self.now_s = 1000.0
        self.rng = Random(seed)
        self.hasher = BlockHasher(SECRET)
        self.draw: Callable[[], Fate] = lambda: Fate.ANSWER
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=self.clock)
        self.metrics = RouterMetrics("toy")
        self.decisions = DecisionLog(16, clock=self.clock)
        placer = Placer(
            registry=self.registry,
            model=CostModel(),
            rng=Random(seed + 1),
            clock=self.clock,
            replication=ReplicationPolicy(most_prefixes=16),
            decisions=self.decisions,
            observer=self.metrics.placement,
        )
        self.dispatcher = Dispatcher(
            placer=placer,
            hasher=self.hasher,
            settings=DispatchSettings(hedging=HedgingSettings()),
            clock=self.clock,
            rng=Random(seed + 2),
            observer=self.metrics,
        )
        limits = LimitsConfig(default=TenantLimits(concurrent_requests=1000, tokens_per_minute=10**9))
        self.limiter = RateLimiter(limits, clock=self.clock)
        config = ClusterConfig(
            router=RouterConfig(max_inflight_requests=MAX_INFLIGHT, queue=QueueConfig(max_running_per_worker=8))
        )
        self.gate = make_admission_queue(config, self.dispatcher, self.registry, self.clock, self.limiter, self.metrics)
        self.readiness = ReadinessCheck(self.registry, self.metrics, lambda _: True)
        self.workers = [PortWorker(f"d{i}", self) for i in range(num_decode)]
        self.workers += [PortWorker(f"p{i}", self) for i in range(num_prefill)]
        self.workers += [PortWorker(name, self) for name in names]
        self.num_requests = 0
        self.num_turns = 0
        """Of the loop, that the last crowd took: the time of this world."""

    def clock(self) -> float:
        return self.now_s

    def request(self, prompt: Sequence[int] | None = None) -> RoutedRequest:
        """A prompt that was not sent before, by default: mostly short, some worth a hand-off."""
        self.num_requests += 1
        length = self.rng.choice((20, 40, 40, 300))
        fresh = (self.num_requests, *(self.rng.randrange(900) for _ in range(length)))
        return RoutedRequest(
            request_id=RequestId(f"r{self.num_requests}"),
            prompt_token_ids=tuple(prompt or fresh),
            sampling=SamplingParams(max_tokens=2, seed=1),
            hash_root=ROOT,
            tenant=self.rng.choice(TENANTS),
            num_choices=self.rng.choice((1, 1, 1, 2)),
            priority=self.rng.choice((0, 0, 1)),
        )

    async def crowd(self, count: int, patience: Callable[[], int]) -> int:
        """So many clients at once, each of which leaves after `patience()` turns of the loop; how many were served."""
        tasks = {asyncio.create_task(self._ask()): patience() for _ in range(count)}
        self.num_turns = 0
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                if self.num_turns >= tasks[task]:
                    task.cancel()
            self.num_turns += 1
            await asyncio.sleep(0)
            if self.num_turns % _TURNS_PER_REPORT == 0:
                for one in self.workers:
                    one.report()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in done if isinstance(one, Exception)], done
        return sum(one is True for one in done)

    def assert_nothing_is_left(self) -> None:
        """Of all requests that ever were: no place, no turn, no entry of any book, no timer, no attempt on a worker."""
        admission, dispatcher = self.gate.admission, self.dispatcher
        assert (admission.num_inflight, admission.num_waiting, admission.num_waiting_tokens) == (0, 0, 0)
        assert (len(self.gate.turns), len(admission._watch.in_transit), len(admission._entries)) == (0, 0, 0)
        assert [self.limiter.num_inflight(tenant) for tenant in TENANTS] == [0] * len(TENANTS)
        assert (dispatcher.num_inflight, len(dispatcher._runs), dispatcher.num_waiting_for_room) == (0, 0, 0)
        assert dispatcher.health.poison.check([])
        breakers = dispatcher.health.breakers.by_worker.values()
        assert {breaker._probed_s for breaker in breakers} <= {None}, (
            "a probe that was taken back makes way for another"
        )
        for one in self.workers:
            one.report()
            assert not one.live, "attempts that leave are cancelled where they run"
        assert self.registry.in_flight() == ()
        assert {(w.own_backlog, w.num_assigned) for w in self.registry._workers.values()} == {(0, 0)}
        self.now_s += _EXPECTATIONS_LAPSE_S
        self.registry.prefix_map.expire(self.now_s)
        assert not any(held.expected for held in self.registry.prefix_map._workers.values())
        loop: Any = asyncio.get_running_loop()
        timers = [timer for timer in loop._scheduled if not timer.cancelled()]
        assert all(timer is self.gate._recheck_timer for timer in timers), timers
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def _ask(self) -> bool:
        listener, request = Listener(), self.request()
        try:
            await self.dispatcher.run(request, listener)
        except ServingError:
            return False
        return listener.num_tokens == 2 * request.num_choices
