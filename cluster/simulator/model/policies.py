"""Placement policies to compare ours with, using the same knowledge: registry, ledger and prefix map.

- `random`, `round_robin`; `least_load`: the smallest backlog of tokens to compute; `longest_prefix`: the longest cached
  prefix.
- `sglang`: the published policy of sglang-router (now smg): while the numbers of requests in flight differ by more than
  `balance_abs_threshold` and by the factor `balance_rel_threshold`, the least loaded worker; else the worker that was
  sent the longest matching prefix if that exceeds `cache_threshold` of the prompt, else the least loaded. It knows what
  it has sent, in a tree of its own, and not what workers have evicted.
- `dynamo`: the published cost of NVIDIA Dynamo's KV router: overlap weight x prefill blocks (in flight, and new ones
  not cached) + active decode blocks; the lowest cost, or a softmax of normalised costs at a temperature above 0. For a
  prefill-only pool it counts no decode blocks.
- `approximate`: the same cost over an index without events from workers, as Dynamo's router keeps one: what was sent to
  a worker counts as cached there for `ttl_s` after it was last used, whatever the worker has evicted.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp
from random import Random
from typing import NamedTuple, Protocol

from router.placement.costs import CostModel
from router.placement.placer import Assignment, Placer
from router.placement.worker_selection import NoDecodeWorker, Placement, PlacementReason
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.adapters.files import Adapter
from tandem.errors import InvariantError
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, WorkerId
from tandem.values.roles import WorkerRole

OURS = "tandem"


class Candidate(NamedTuple):
    """Worker that may be chosen."""

    worker: WorkerSnapshot
    num_matched_tokens: int
    num_active_tokens: int
    """Tokens of all requests sent there that have not ended."""


class Wanted(NamedTuple):
    num_tokens: int
    names: Sequence[BlockHash]
    computes: bool
    """Whether the worker computes the prompt; else it only decodes."""
    now_s: float = 0.0


class Rule(Protocol):
    """Chooses among one or more candidates."""

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate: ...


def _least(candidates: Sequence[Candidate], cost: Callable[[Candidate], float], rng: Random) -> Candidate:
    costs = [cost(candidate) for candidate in candidates]
    least = min(costs)
    return candidates[rng.choice([i for i, value in enumerate(costs) if value == least])]


def _least_loaded(wanted: Wanted, candidates: Sequence[Candidate], rng: Random) -> Candidate:
    if wanted.computes:
        return _least(candidates, lambda c: c.worker.backlog_tokens, rng)
    return _least(candidates, lambda c: c.worker.num_active, rng)


class RandomRule:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        return self._rng.choice(candidates)


class RoundRobin:
    """Chooses the workers of each pool in turn."""

    def __init__(self, _rng: Random) -> None:
        self._next: dict[WorkerRole, int] = {}

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        role = candidates[0].worker.info.role
        number = self._next.get(role, 0)
        self._next[role] = number + 1
        return candidates[number % len(candidates)]


class LeastLoad:
    """Chooses the worker with the least to compute; for decoding, the one with the fewest requests."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        return _least_loaded(wanted, candidates, self._rng)


class LongestPrefix:
    """Chooses the worker with the longest cached prefix, whatever its queue."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        longest = max(candidate.num_matched_tokens for candidate in candidates)
        best = [candidate for candidate in candidates if candidate.num_matched_tokens == longest]
        return _least_loaded(wanted, best, self._rng)


class SGLang:
    cache_threshold = 0.3
    balance_abs_threshold = 64
    balance_rel_threshold = 1.5

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._sent: dict[BlockHash, dict[WorkerId, None]] = {}
        """Workers that each block was sent to, the latest last."""

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        chosen = self._choose(wanted, candidates)
        if wanted.computes:
            worker_id = chosen.worker.info.key.worker_id
            for name in self._blocks(wanted, chosen):
                senders = self._sent.setdefault(name, {})
                senders.pop(worker_id, None)
                senders[worker_id] = None
        return chosen

    def _choose(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        loads = [candidate.worker.num_active for candidate in candidates]
        spread, most, least = max(loads) - min(loads), max(loads), min(loads)
        if wanted.computes and not (spread > self.balance_abs_threshold and most > self.balance_rel_threshold * least):
            by_id = {candidate.worker.info.key.worker_id: candidate for candidate in candidates}
            found, num_tokens = self._longest(wanted, candidates[0], by_id)
            if found is not None and num_tokens > self.cache_threshold * wanted.num_tokens:
                return found
        return _least(candidates, lambda c: c.worker.num_active, self._rng)

    def _longest(
        self, wanted: Wanted, any_one: Candidate, by_id: Mapping[WorkerId, Candidate]
    ) -> tuple[Candidate | None, int]:
        found: Candidate | None = None
        depth = 0
        for name in self._blocks(wanted, any_one):
            senders = [worker for worker in self._sent.get(name, ()) if worker in by_id]
            if not senders:
                break
            found, depth = by_id[senders[-1]], depth + 1
        return found, depth * any_one.worker.info.layout.block_size

    @staticmethod
    def _blocks(wanted: Wanted, candidate: Candidate) -> Sequence[BlockHash]:
        spacing = candidate.worker.info.layout.block_size // HASH_BLOCK_TOKENS
        return wanted.names[spacing - 1 :: spacing]


class Dynamo:
    overlap_weight = 1.0
    temperature = 0.0

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        if self.temperature <= 0.0:
            return _least(candidates, lambda candidate: self._cost(wanted, candidate), self._rng)
        costs = [self._cost(wanted, candidate) for candidate in candidates]
        low, high = min(costs), max(costs)
        weights = [exp(-(cost - low) / ((high - low) or 1.0) / self.temperature) for cost in costs]
        return self._rng.choices(candidates, weights)[0]

    def _cost(self, wanted: Wanted, candidate: Candidate) -> float:
        worker = candidate.worker
        num_prefill = worker.backlog_tokens + wanted.num_tokens - candidate.num_matched_tokens if wanted.computes else 0
        num_decode = candidate.num_active_tokens + wanted.num_tokens if worker.info.role is WorkerRole.DECODE else 0
        return (self.overlap_weight * num_prefill + num_decode) / worker.info.layout.block_size


class Approximate(Dynamo):
    ttl_s = 120.0

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._used_s: dict[BlockHash, dict[WorkerId, float]] = {}
        """Time at which each block was last sent to a worker."""

    def __call__(self, wanted: Wanted, candidates: Sequence[Candidate]) -> Candidate:
        if not wanted.computes:
            return super().__call__(wanted, candidates)
        spacing = candidates[0].worker.info.layout.block_size // HASH_BLOCK_TOKENS
        blocks = wanted.names[spacing - 1 :: spacing]
        depths = self._depths(blocks, wanted.now_s)
        known = [
            candidate._replace(
                num_matched_tokens=min(
                    depths.get(candidate.worker.info.key.worker_id, 0) * spacing * HASH_BLOCK_TOKENS,
                    (wanted.num_tokens - 1) // (spacing * HASH_BLOCK_TOKENS) * spacing * HASH_BLOCK_TOKENS,
                )
            )
            for candidate in candidates
        ]
        chosen = super().__call__(wanted, known)
        for name in blocks:
            self._used_s.setdefault(name, {})[chosen.worker.info.key.worker_id] = wanted.now_s
        return chosen

    def _depths(self, blocks: Sequence[BlockHash], now_s: float) -> dict[WorkerId, int]:
        """Count the leading blocks that each worker was sent within the time to live."""
        found: dict[WorkerId, int] = {}
        for depth, name in enumerate(blocks, 1):
            used = self._used_s.get(name, {})
            alive = [worker for worker, at_s in used.items() if now_s - at_s <= self.ttl_s]
            holders = [worker for worker in alive if found.get(worker, 0) == depth - 1]
            if not holders:
                break
            found.update(dict.fromkeys(holders, depth))
        return found


RULES: Mapping[str, Callable[[Random], Rule]] = {
    "random": RandomRule,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "longest_prefix": LongestPrefix,
    "sglang": SGLang,
    "dynamo": Dynamo,
    "approximate": Approximate,
}
POLICIES = (*RULES, OURS)


class RulePlacer(Placer):
    """Keeps records as the real placer does, and lets a rule choose prefill and decode worker independently."""

    def __init__(self, *, registry: WorkerRegistry, rule: Rule, rng: Random, clock: Callable[[], float]) -> None:
        super().__init__(registry=registry, model=CostModel(), rng=rng, clock=clock)
        self._rule = rule
        self._now = clock
        self._active_tokens: dict[WorkerKey, int] = {}

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
        registry = self.registry
        registry.prefix_map.expire(self._now())
        matched = registry.prefix_map.longest_prefix(names)
        able = [
            self._candidate(worker, matched, num_tokens)
            for worker in registry.snapshots()
            if not worker.draining
            and worker.info.key not in excluded
            and only in (None, worker.info.key)
            and worker.info.pool_tokens > max(num_tokens, pool_tokens_above)
        ]
        prefills = [candidate for candidate in able if candidate.worker.info.role is WorkerRole.PREFILL]
        decodes = [candidate for candidate in able if candidate.worker.info.role is WorkerRole.DECODE]
        if not decodes:
            raise NoDecodeWorker("no decode worker can accept the request")
        now_s, remote = self._now(), bool(prefills) and not is_local
        prefill = self._rule(Wanted(num_tokens, names, True, now_s), prefills) if remote else None
        decode = self._rule(Wanted(num_tokens, names, prefill is None, now_s), decodes)
        return self._book(num_tokens, names, decode, prefill)

    def release(self, assignment: Assignment) -> None:
        super().release(assignment)
        self._active_tokens[assignment.decode] -= assignment.num_tokens

    def _candidate(self, worker: WorkerSnapshot, matched: Mapping[WorkerId, int], num_tokens: int) -> Candidate:
        key, block_size = worker.info.key, worker.info.layout.block_size
        held = min(matched.get(key.worker_id, 0) * HASH_BLOCK_TOKENS, num_tokens - 1)
        return Candidate(worker, held // block_size * block_size, self._active_tokens.get(key, 0))

    def _book(
        self, num_tokens: int, names: Sequence[BlockHash], decode: Candidate, prefill: Candidate | None
    ) -> Assignment:
        registry, computing = self.registry, prefill or decode
        key, computing_key = decode.worker.info.key, computing.worker.info.key
        port = registry.port(key)
        if port is None:
            raise InvariantError(f"worker {key.worker_id} was chosen but is not live")
        num_uncached = num_tokens - computing.num_matched_tokens
        placement = Placement(
            decode=decode.worker,
            prefill=None if prefill is None else prefill.worker,
            reason=PlacementReason.NO_PREFILL_WORKER if prefill is None else PlacementReason.DISAGGREGATED,
            cached_tokens=computing.num_matched_tokens,
            uncached_tokens=num_uncached,
            predicted_ms=0.0,
        )
        booked = registry.assign(key, num_uncached if prefill is None else 0)
        registry.prefix_map.expect(computing_key.worker_id, names, now_s=self._now())
        self._active_tokens[key] = self._active_tokens.get(key, 0) + num_tokens
        return Assignment(
            placement=placement,
            port=port,
            names=names,
            num_tokens=num_tokens,
            decode=key,
            computing=computing_key,
            booked=booked,
            prompt=booked if prefill is None else registry.assign(computing_key, num_uncached),
        )
