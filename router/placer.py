"""Finds workers for a choice and keeps the books of it: the ledger of what was sent, and what will be cached where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from router.holders import Confirmed, best_holder
from router.placement import CostModel, Demand, Placement, PlacementReason, place, place_prefill
from router.session_events import WorkerPort
from router.worker_view import WorkerKey, WorkerSnapshot
from router.workers import WorkerRegistry
from tandem.block_hash import HASH_BLOCK_TOKENS
from tandem.errors import InvariantError
from tandem.ids import BlockHash, Incarnation, WorkerId
from tandem.prefix_holder import PrefixHolder


@dataclass(slots=True, kw_only=True)
class Assignment:
    """One attempt's workers. Mutated by the Placer that made it, alone."""

    placement: Placement
    port: WorkerPort
    names: Sequence[BlockHash]
    num_tokens: int
    computing: WorkerKey
    """Who computes the prompt, at the moment."""
    tokens_to_compute: int
    """Not known to be computed yet."""
    holder: PrefixHolder | None = None
    """Who is thought to hold more of the prefix than `computing`."""

    @property
    def decode(self) -> WorkerKey:
        """The worker that answers."""
        return self.placement.decode.info.key


class Placer:
    """Applies the pure placement to the live workers."""

    def __init__(self, *, registry: WorkerRegistry, model: CostModel, rng: Random, clock: Callable[[], float]) -> None:
        self.registry = registry
        self._model = model
        self._rng = rng
        self._clock = clock

    def assign(
        self,
        *,
        num_tokens: int,
        names: Sequence[BlockHash],
        excluded: frozenset[WorkerKey] = frozenset(),
        pool_tokens_above: int = 0,
    ) -> Assignment:
        """Choose workers for prompt and earlier output, whose blocks are `names`.

        Raises NoDecodeWorker or RequestTooLarge.
        """
        registry = self.registry
        demand = self._demand(num_tokens, names, excluded, pool_tokens_above)
        workers = registry.snapshots()
        placement = place(demand, workers, self._model, self._rng)
        decode, computing = placement.decode.info.key, placement.computing.info.key
        port = registry.port(decode)
        if port is None:
            raise InvariantError(f"worker {decode.worker_id} was placed but is not live")
        assignment = Assignment(
            placement=placement,
            port=port,
            names=names,
            num_tokens=num_tokens,
            computing=computing,
            tokens_to_compute=placement.uncached_tokens,
            holder=best_holder(demand, placement.computing, workers, self._confirmed(names)),
        )
        registry.assign(decode, 0 if placement.prefill else placement.uncached_tokens)
        if placement.prefill:
            registry.assign(computing, placement.uncached_tokens)
        # Only where it is computed: the decode worker's copy exists when the hand-off has committed, not before.
        registry.prefix_map.expect(computing.worker_id, names, now_s=self._clock())
        return assignment

    def adopt(self, worker: Incarnation, *, num_tokens: int, names: Sequence[BlockHash]) -> Assignment | None:
        """A choice that runs on that worker already, draining or not; None: that process is gone."""
        found = next((w for w in self.registry.snapshots() if w.info.key.incarnation == worker), None)
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
            candidates=(),
        )
        self.registry.assign(found.info.key, 0)
        return Assignment(
            placement=placement,
            port=port,
            names=names,
            num_tokens=num_tokens,
            computing=found.info.key,
            tokens_to_compute=0,
        )

    def reassign_prefill(self, assignment: Assignment, excluded: frozenset[WorkerKey]) -> WorkerSnapshot | None:
        """Another prefill worker after a failed hand-off; None: the decode worker computes the prompt itself."""
        self._stop_computing(assignment)
        demand = self._demand(assignment.num_tokens, assignment.names, excluded)
        workers = self.registry.snapshots()
        prefill = place_prefill(demand, assignment.placement.decode, workers, self._model, self._rng)
        confirmed = self._confirmed(assignment.names)
        assignment.holder = best_holder(demand, prefill, workers, confirmed) if prefill else None
        self._compute_on(assignment, assignment.decode if prefill is None else prefill.info.key)
        return prefill

    def compute_locally(self, assignment: Assignment) -> None:
        """No further prefill worker is tried."""
        self._stop_computing(assignment)
        self._compute_on(assignment, assignment.decode)

    def prompt_computed(self, assignment: Assignment) -> None:
        """The first token came."""
        if assignment.tokens_to_compute:
            self.registry.computed(assignment.computing, assignment.tokens_to_compute)
            assignment.tokens_to_compute = 0
        if assignment.computing != assignment.decode:
            self.registry.release(assignment.computing)
            assignment.computing = assignment.decode

    def release(self, assignment: Assignment) -> None:
        """The attempt is over, well or not."""
        self._stop_computing(assignment)
        self.registry.release(assignment.decode)

    def _stop_computing(self, assignment: Assignment) -> None:
        if assignment.tokens_to_compute:
            self.registry.prefix_map.revoke(assignment.computing.worker_id, assignment.names)
        self.prompt_computed(assignment)

    def _compute_on(self, assignment: Assignment, key: WorkerKey) -> None:
        assignment.computing = key
        assignment.tokens_to_compute = assignment.num_tokens
        self.registry.assign(key, assignment.num_tokens)
        if key == assignment.decode:
            self.registry.release(key)
        self.registry.prefix_map.expect(key.worker_id, assignment.names, now_s=self._clock())

    def _confirmed(self, names: Sequence[BlockHash]) -> Confirmed:
        prefix_map = self.registry.prefix_map

        def confirmed(worker: WorkerId, num_tokens: int) -> int:
            return prefix_map.num_confirmed(worker, names[: num_tokens // HASH_BLOCK_TOKENS]) * HASH_BLOCK_TOKENS

        return confirmed

    def _demand(
        self,
        num_tokens: int,
        names: Sequence[BlockHash],
        excluded: frozenset[WorkerKey],
        pool_tokens_above: int = 0,
    ) -> Demand:
        prefix_map = self.registry.prefix_map
        prefix_map.expire(self._clock())
        matched = prefix_map.longest_prefix(names)
        return Demand(
            num_tokens=num_tokens,
            matched_tokens={worker: blocks * HASH_BLOCK_TOKENS for worker, blocks in matched.items()},
            excluded=excluded,
            pool_tokens_above=pool_tokens_above,
        )
