"""Places choices on workers, and accounts for it: the load that was sent, and which blocks will be cached where."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from random import Random

import numpy as np
from msgspec import Struct

from router.placement.costs import CostModel
from router.placement.decision_log import DecisionLog, PlacementDecision, PlacementObserver
from router.placement.demand import PlacementDemand
from router.placement.prefix_holders import best_holder
from router.placement.prefix_replication import HotPrefix, HotPrefixes, ReplicationPolicy
from router.placement.worker_selection import (
    Affinity,
    Placement,
    PlacementReason,
    place,
    place_prefill,
)
from router.types.requests import PinRequest
from router.types.session_events import WorkerPort
from router.types.worker_view import AdapterReport, WorkerKey, WorkerSnapshot
from router.workers.booking import Booking
from router.workers.columns import ClusterView
from router.workers.registry import WorkerRegistry
from tandem.adapters.files import Adapter
from tandem.errors import InvariantError
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, Incarnation, RequestId, WorkerId
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.roles import WorkerRole


class PendingHandoff(Struct, frozen=True, kw_only=True):
    source: WorkerId
    """The worker that computes the prompt."""
    target: WorkerId
    """The worker that decodes it."""
    num_tokens: int
    """Tokens that the source has to compute."""
    since_s: float


class PendingHandoffs:
    """Hand-offs that were placed and have not ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: dict[Hashable, PendingHandoff] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def began(self, key: Hashable, *, source: WorkerId, target: WorkerId, num_tokens: int) -> None:
        """Record a hand-off; `key` identifies it until it has ended."""
        self._under_way[key] = PendingHandoff(
            source=source, target=target, num_tokens=num_tokens, since_s=self._clock()
        )

    def ended(self, key: Hashable) -> None:
        """Record its end, successful or not; idempotent."""
        self._under_way.pop(key, None)

    def oldest(self, most: int) -> list[PendingHandoff]:
        """Return up to `most` of them, the oldest first: a dict keeps its order."""
        found: list[PendingHandoff] = []
        for handoff in self._under_way.values():
            if len(found) == most:
                break
            found.append(handoff)
        return found


class Assignment(Struct, kw_only=True):
    """The workers of one attempt. Mutated only by the Placer that made it."""

    placement: Placement
    port: WorkerPort
    names: Sequence[BlockHash]
    num_tokens: int
    decode: WorkerKey
    """The worker that decodes."""
    computing: WorkerKey
    """The worker that currently computes the prompt."""
    booked: Booking
    """Load booked on the worker that decodes."""
    prompt: Booking
    """Load booked where the prompt is computed: the same booking, or one on a prefill worker."""
    holder: PrefixHolder | None = None
    """The worker thought to hold more of the prefix than `computing`."""
    seconds: float = 0.0
    """Time that the placement took."""
    pins: tuple[PinRequest, ...] = ()
    """Pins requested for its prompt; empty once the first token has arrived."""
    tenant: str = ""
    adapter: Adapter | None = None
    """The adapter that its workers need; None: none, or it runs already."""
    decision: PlacementDecision | None = None
    """Its entry in the decision log; None until it is recorded."""


_REPORTED_AFTER_S = 2.0
"""Time from the end of a load until it is certain that a report shows it."""


ADAPTER_REFUSED_S = 10.0
"""Time for which a worker that lacked an adapter's files is avoided for that adapter: they may be on their way."""


class AdapterHolders:
    """Adapters that this router's requests have made workers load, and those that workers have refused.

    A worker's load report says what it has loaded. What this router has sent it since counts, too, until a report can
    show it: otherwise each of the first requests for an adapter would make another worker load it.
    """

    def __init__(self, *, bytes_per_s: float, load_ms: float) -> None:
        """A load is assumed to take `load_ms`, and the time of its bytes at `bytes_per_s`."""
        self._bytes_per_s = bytes_per_s
        self._least_s = load_ms / 1e3
        self._expected_until_s: dict[tuple[str, WorkerKey], float] = {}
        self._refused_until_s: dict[tuple[str, WorkerKey], float] = {}

    def sent(self, adapter: Adapter | None, workers: Iterable[WorkerKey], now_s: float) -> None:
        """Record that a request for an adapter was sent to workers, which load it if they lack it; None: for none."""
        if adapter is None:
            return
        self._expected_until_s = _without_late(self._expected_until_s, now_s)
        for worker in workers:
            self._expected_until_s[adapter.digest, worker] = now_s + self._load_s(adapter) + _REPORTED_AFTER_S

    def refused(self, adapter: Adapter, worker: WorkerKey, now_s: float) -> None:
        """Record that a worker lacks an adapter's files, or has others: for a while it is avoided for that adapter."""
        self._expected_until_s.pop((adapter.digest, worker), None)
        self._refused_until_s = _without_late(self._refused_until_s, now_s)
        self._refused_until_s[adapter.digest, worker] = now_s + ADAPTER_REFUSED_S

    def refused_by(self, adapter: Adapter, now_s: float) -> set[WorkerKey]:
        """Return the workers that are avoided for an adapter."""
        return {
            worker
            for (digest, worker), until_s in self._refused_until_s.items()
            if digest == adapter.digest and until_s > now_s
        }

    def load_ms(self, adapter: Adapter, view: ClusterView, now_s: float) -> list[float]:
        """Return the time that each worker would take to load an adapter, by slot; 0 where it is loaded, or will be
        for an earlier request. Where it is refused, it is not loaded before that time is over; where there is no room,
        another one gives way and will be loaded again: that counts as much."""
        found = [0.0] * view.num_slots
        once_ms, digest = 1e3 * self._load_s(adapter), adapter.digest
        for pool in (view.decode, view.prefill):
            for info, load, slot in zip(pool.members.infos, pool.loads, pool.members.slot_list, strict=True):
                if digest in load.resident_adapters:
                    continue
                load_ms = once_ms if _has_room(load.adapters, adapter) else 2 * once_ms
                if (refused_s := self._refused_until_s.get((digest, info.key), now_s) - now_s) > 0.0:
                    found[slot] = load_ms + 1e3 * refused_s
                elif not self._is_expected(digest, info.key, now_s):
                    found[slot] = load_ms
        return found

    def _load_s(self, adapter: Adapter) -> float:
        return self._least_s + adapter.num_bytes / self._bytes_per_s

    def _is_expected(self, digest: str, worker: WorkerKey, now_s: float) -> bool:
        return self._expected_until_s.get((digest, worker), now_s) > now_s


def _has_room(report: AdapterReport | None, adapter: Adapter) -> bool:
    return report is None or report.held_bytes + adapter.num_bytes <= report.capacity_bytes


def _without_late(until_s: dict[tuple[str, WorkerKey], float], now_s: float) -> dict[tuple[str, WorkerKey], float]:
    """Forget what is over, whenever there might be much."""
    return until_s if len(until_s) < 1024 else {key: until for key, until in until_s.items() if until > now_s}


class Placer:
    """Applies the pure placement to the live workers."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        model: CostModel,
        rng: Random,
        clock: Callable[[], float],
        replication: ReplicationPolicy | None = None,
        decisions: DecisionLog | None = None,
        observer: PlacementObserver | None = None,
    ) -> None:
        self.registry = registry
        self._model = model
        self._rng = rng
        self._clock = clock
        self._hot = HotPrefixes(replication or ReplicationPolicy())
        self._decisions = decisions
        self._observer = observer
        self.adapters = AdapterHolders(bytes_per_s=model.adapter_bytes_per_s, load_ms=model.adapter_load_ms)
        self.handoffs = PendingHandoffs(clock)
        """Prompts that are being computed for another worker."""

    def hottest(self, most: int) -> list[HotPrefix]:
        """Return the most requested prefixes."""
        return self._hot.hottest(most, self._clock())

    def assign(
        self,
        *,
        num_tokens: int,
        names: Sequence[BlockHash],
        excluded: frozenset[WorkerKey] = frozenset(),
        only: WorkerKey | None = None,
        pool_tokens_above: int = 0,
        is_local: bool = False,
        adapter: Adapter | None = None,
    ) -> Assignment:
        """Choose workers for prompt and earlier output, whose blocks are `names`; the rest as in `PlacementDemand`.

        Raises NoDecodeWorker or RequestTooLarge.
        """
        registry, now_s = self.registry, self._clock()
        prefix_map, view = registry.prefix_map, registry.view()
        demand = self._demand(
            num_tokens,
            names,
            view,
            excluded,
            pool_tokens_above,
            now_s=now_s,
            only=only,
            is_local=is_local,
            adapter=adapter,
        )
        placement = place(demand, view, self._model, self._rng)
        prefill, decode = placement.prefill, placement.decode.info.key
        worker = registry.find(decode)
        if worker is None:
            raise InvariantError(f"worker {decode.worker_id} was chosen but is not live")
        booked = prompt = Booking(worker, placement.work_tokens if prefill is None else 0)
        computing = placement.decode.info
        if prefill is not None:
            computing, prompt = prefill.info, registry.assign(prefill.info.key, placement.work_tokens)
        assignment = Assignment(
            placement=placement,
            port=worker.port,
            names=names,
            num_tokens=num_tokens,
            decode=decode,
            computing=computing.key,
            booked=booked,
            prompt=prompt,
            holder=best_holder(demand, computing, view, partial(self._num_confirmed, names)),
            adapter=adapter,
        )
        self.adapters.sent(adapter, {decode, computing.key}, now_s)
        self._hot.on_placed(names, work_ms=placement.compute_ms, tokens=placement.uncached_tokens, now_s=now_s)
        if placement.affinity is Affinity.REPLICA:
            self._hot.copied(names, demand.replicate_tokens, placement.cached_tokens, now_s=now_s)
        # Only where it is computed: the decode worker's copy exists once the hand-off has committed, not before.
        prefix_map.expect(computing.key.worker_id, names, now_s=now_s)
        if prefill is not None:
            self._handed_off(assignment, placement.work_tokens)
            prefix_map.use(decode.worker_id, names[: placement.held_by_decode // HASH_BLOCK_TOKENS])
        assignment.seconds = self._clock() - now_s
        return assignment

    def adopt(self, worker: Incarnation, *, num_tokens: int, names: Sequence[BlockHash]) -> Assignment | None:
        """Make an assignment for a choice that already runs on that worker, draining or not; None: that process is
        gone."""
        found = self.registry.of_process(worker)
        port = None if found is None else self.registry.port(found.info.key)
        if found is None or port is None:
            return None
        placement = Placement(
            decode=found,
            prefill=None,
            reason=PlacementReason.ADOPTED,
            cached_tokens=num_tokens,
            uncached_tokens=0,
            predicted_ms=0.0,
        )
        booked = self.registry.assign(found.info.key, 0)
        return Assignment(
            placement=placement,
            port=port,
            names=names,
            num_tokens=num_tokens,
            decode=found.info.key,
            computing=found.info.key,
            booked=booked,
            prompt=booked,
        )

    def record(
        self, assignment: Assignment, request_id: RequestId, tenant: str, pins: tuple[PinRequest, ...] = ()
    ) -> None:
        """Log, trace and count the decision, under the choice's id; unrecorded decisions are invisible.

        `pins`: beginnings of the prompt to pin where it is computed.
        """
        assignment.tenant, assignment.pins = tenant, pins
        placement, holder = assignment.placement, assignment.holder
        assignment.decision = PlacementDecision(
            request_id=request_id,
            tenant=tenant,
            at_s=self._clock(),
            num_tokens=assignment.num_tokens,
            placement=placement,
            holder=None if holder is None else holder.worker_id,
            seconds=assignment.seconds,
        )
        if self._decisions is not None:
            self._decisions.add(assignment.decision)
        if self._observer is not None:
            self._observer.decided(reason=placement.reason, affinity=placement.affinity, seconds=assignment.seconds)

    def reassign_prefill(self, assignment: Assignment, excluded: frozenset[WorkerKey]) -> WorkerSnapshot | None:
        """Choose another prefill worker after a failed hand-off; None: the decode worker computes the prompt itself."""
        self._stop_computing(assignment)
        view = self.registry.view()
        now_s, adapter = self._clock(), assignment.adapter
        demand = self._demand(assignment.num_tokens, assignment.names, view, excluded, now_s=now_s, adapter=adapter)
        found = place_prefill(demand, assignment.placement.decode, view, self._model, self._rng)
        if found is None:
            assignment.holder = None
            self._compute_on(assignment, assignment.decode, assignment.num_tokens)
            return None
        prefill, work = found
        if adapter is not None:
            self.adapters.sent(adapter, (prefill.info.key,), now_s)
        assignment.holder = best_holder(demand, prefill.info, view, partial(self._num_confirmed, assignment.names))
        self._compute_on(assignment, prefill.info.key, work)
        return prefill

    def compute_locally(self, assignment: Assignment) -> None:
        """Let the decode worker compute the prompt: no further prefill worker is tried."""
        self._stop_computing(assignment)
        self._compute_on(assignment, assignment.decode, assignment.num_tokens)

    def prompt_computed(self, assignment: Assignment) -> WorkerRole | None:
        """Record that the prompt's blocks now exist where it was computed; return that worker's pool, None if
        unknown."""
        pins, assignment.pins = assignment.pins, ()
        if pins:
            self.registry.pins.used(assignment.tenant, pins, assignment.computing, assignment.names)
        here = assignment.computing == assignment.decode
        self._prompt_is_over(assignment)
        if assignment.placement.reason is PlacementReason.ADOPTED:
            return None
        return WorkerRole.DECODE if here else WorkerRole.PREFILL

    def _prompt_is_over(self, assignment: Assignment) -> None:
        if assignment.prompt.tokens:
            assignment.prompt.computed()
            self.registry.prefix_map.computed(assignment.computing.worker_id, assignment.names, now_s=self._clock())
        if assignment.prompt is not assignment.booked:
            assignment.prompt.end()
            self.handoffs.ended(id(assignment))
            assignment.prompt, assignment.computing = assignment.booked, assignment.decode

    def found_cached(self, assignment: Assignment, num_tokens: int) -> None:
        """Record how many tokens need not be computed, as reported by the worker that computed the others."""
        if (decision := assignment.decision) is None or decision.actual_cached_tokens is not None:
            return
        decision.actual_cached_tokens = num_tokens
        if self._observer is not None and not decision.rerouted:
            predicted = decision.placement.cached_tokens
            self._observer.compared(predicted_tokens=predicted, actual_tokens=num_tokens)

    def release(self, assignment: Assignment) -> None:
        """Release the attempt's load: it has ended, successfully or not."""
        if assignment.prompt.tokens or assignment.prompt is not assignment.booked:
            self._stop_computing(assignment)
        assignment.booked.end()

    def _stop_computing(self, assignment: Assignment) -> None:
        if assignment.prompt.tokens:
            self.registry.prefix_map.revoke(assignment.computing.worker_id, assignment.names)
        self._prompt_is_over(assignment)

    def _compute_on(self, assignment: Assignment, key: WorkerKey, num_tokens: int) -> None:
        assignment.computing = key
        if assignment.decision is not None:
            assignment.decision.rerouted += (key.worker_id,)
        if key == assignment.decode:
            assignment.booked.add_tokens(num_tokens)
        else:
            assignment.prompt = self.registry.assign(key, num_tokens)
            self._handed_off(assignment, num_tokens)
        self.registry.prefix_map.expect(key.worker_id, assignment.names, now_s=self._clock())

    def _handed_off(self, assignment: Assignment, num_tokens: int) -> None:
        source, target = assignment.computing.worker_id, assignment.decode.worker_id
        self.handoffs.began(id(assignment), source=source, target=target, num_tokens=num_tokens)

    def adapter_ms(self, adapter: Adapter) -> dict[WorkerKey, float]:
        """Return the time that each worker would take to load an adapter."""
        view = self.registry.view()
        by_slot = self.adapters.load_ms(adapter, view, self._clock())
        return {
            info.key: by_slot[slot]
            for pool in (view.decode, view.prefill)
            for info, slot in zip(pool.members.infos, pool.members.slot_list, strict=True)
        }

    def _num_confirmed(self, names: Sequence[BlockHash], worker: WorkerId, num_tokens: int) -> int:
        """See `Confirmed`."""
        leading = names[: num_tokens // HASH_BLOCK_TOKENS]
        return self.registry.prefix_map.num_confirmed(worker, leading) * HASH_BLOCK_TOKENS

    def _demand(
        self,
        num_tokens: int,
        names: Sequence[BlockHash],
        view: ClusterView,
        excluded: frozenset[WorkerKey],
        pool_tokens_above: int = 0,
        *,
        now_s: float,
        only: WorkerKey | None = None,
        is_local: bool = False,
        adapter: Adapter | None = None,
    ) -> PlacementDemand:
        prefix_map = self.registry.prefix_map
        prefix_map.expire(now_s)
        matched = prefix_map.match(names, weight=HASH_BLOCK_TOKENS)
        has_prefill = len(view.prefill.members.infos) > 0

        def num_holders(tokens: int) -> int:
            pool = view.prefill if has_prefill else view.decode
            return int((np.asarray(matched)[pool.members.slots] >= tokens).sum())

        return PlacementDemand(
            num_tokens=num_tokens,
            matched=matched,
            excluded=excluded,
            only=only,
            pool_tokens_above=pool_tokens_above,
            is_local=is_local,
            replicate_tokens=self._hot.wanted_tokens(names, num_holders, now_s),
            now_s=now_s,
            links=self.registry.links(view, now_s) if has_prefill else None,
            adapter_ms=None if adapter is None else self.adapters.load_ms(adapter, view, now_s),
        )
