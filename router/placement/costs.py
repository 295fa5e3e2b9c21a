"""What placement predicts with: bounds and priors, rates by column, and the terms of every cost. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import overload

import numpy as np

from router.types.worker_view import WorkerKey
from router.workers.columns import Bools, Floats, PoolMembers, PoolView
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Bounds and priors; a prior stands for a rate until some worker of the pool has measured it."""

    local_prefill_tokens: int = 64
    """Uncached tokens up to which the decode worker computes the prompt itself, whatever a hand-off costs."""
    max_local_prefill_tokens: int | None = None
    """Uncached tokens beyond which it never does so where a prefill worker can be had; None: whatever costs less."""
    handoff_ms: float = 1.0
    """What a hand-off costs beside queue, computing and bytes: messages between three processes."""
    stall_share: float = 1.0
    """Of the time that a decode worker computes a prompt, how much each of its streams is taken to lose; an idle one
    counts as having one, for the next is never far."""
    again_weight: float = 8.0
    """What a millisecond of computing what another worker of the pool has costs others, per request that an average
    worker has: in an M/M/1 queue just so many wait for it, which makes 1, and it takes blocks from them. The Mooncake
    traces wait least between 4 and 8; more finds more in the caches."""
    prior_prefill_tokens_per_s: float = 5_000.0
    prior_decode_step_s: float = 0.02
    prior_kv_bytes_per_s: float = 1e9
    itl_share: float = 0.02
    """Share by which one more sequence lengthens a decode step."""
    itl_horizon_tokens: int = 64
    """Tokens over which the effect on inter-token latency is counted."""
    tie_ms: float = 0.5
    tie_share: float = 0.02
    """Costs within `tie_ms` plus this share are equal: predictions are no better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCost:
    """One worker's predicted cost, in milliseconds."""

    key: WorkerKey
    role: WorkerRole
    matched_tokens: int
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    stall_ms: float = 0.0
    """What computing the prompt here costs the streams that are here."""
    again_ms: float = 0.0
    """What computing here that which another worker of the pool has costs others."""
    transfer_ms: float = 0.0
    handoff_ms: float = 0.0
    """All else that the best prefill worker and the hand-off from it cost."""
    memory_ms: float = 0.0
    itl_ms: float = 0.0
    penalty_ms: float = 0.0
    """After a refusal or failure: for how long it is better left alone."""
    copy_ms: float = 0.0
    """Below zero: what is not charged because a copy is wanted here."""
    local_threshold_tokens: float | None = None
    """Of a decode worker: uncached tokens up to which it would have computed the prompt itself."""

    @property
    def total_ms(self) -> float:
        """The sum that is minimised."""
        return (
            self.queue_ms + self.compute_ms + self.stall_ms + self.again_ms + self.transfer_ms + self.handoff_ms
            + self.memory_ms + self.itl_ms + self.penalty_ms + self.copy_ms
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCosts:
    """All costs of one pool in one decision. Arrays are [num_workers], of this decision alone."""

    roster: PoolMembers
    held: Floats
    """Leading tokens that a worker need not compute."""
    work: Floats
    """Tokens that it would compute, with what their context adds."""
    total: Floats
    """Infinite for those that may not be chosen."""
    terms: Mapping[str, Floats]

    def candidate(self, row: int) -> CandidateCost:
        info = self.roster.infos[row]
        return CandidateCost(
            key=info.key,
            role=info.role,
            matched_tokens=int(self.held[row]),
            local_threshold_tokens=self.local_threshold(row),
            **{name: float(column[row]) for name, column in self.terms_of(row).items()},
        )

    def local_threshold(self, row: int) -> float | None:
        return None

    def terms_of(self, row: int) -> Mapping[str, Floats]:
        """The terms that count for one worker."""
        return self.terms


class CandidateCosts(Sequence[CandidateCost]):
    """Those of a pool that could have been chosen: the chosen one first, then cheapest first. Made when looked at."""

    __slots__ = ("_chosen", "_costs")

    def __init__(self, costs: PoolCosts, chosen: int | None) -> None:
        self._costs = costs
        self._chosen = chosen

    def __len__(self) -> int:
        return int((self._costs.total < inf).sum())

    @overload
    def __getitem__(self, index: int) -> CandidateCost: ...
    @overload
    def __getitem__(self, index: slice) -> list[CandidateCost]: ...
    def __getitem__(self, index: int | slice) -> CandidateCost | list[CandidateCost]:
        order: list[int] = np.argsort(self._costs.total, kind="stable")[: len(self)].tolist()
        if self._chosen is not None:
            order.remove(self._chosen)
            order.insert(0, self._chosen)
        found = order[index]
        return self._costs.candidate(found) if isinstance(found, int) else [self._costs.candidate(row) for row in found]

    def __iter__(self) -> Iterator[CandidateCost]:
        return iter(self[:])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCosts(PoolCosts):
    """Each with the cheaper of computing the prompt itself and having it handed over."""

    local: Bools
    """Which would compute it themselves."""
    local_terms: Mapping[str, Floats]
    """Of these alone."""
    remote_terms: Mapping[str, Floats]
    """Of the others alone."""
    load: Floats
    """What of the cost is the worker's load alone."""
    num_tokens: int
    floor_tokens: int
    """`CostModel.local_prefill_tokens`."""
    most_tokens: int | None
    """`CostModel.max_local_prefill_tokens`."""

    def terms_of(self, row: int) -> Mapping[str, Floats]:
        """The terms that count for one worker."""
        return {**self.terms, **(self.local_terms if self.local[row] else self.remote_terms)}

    def local_threshold(self, row: int) -> float | None:
        compute_ms, uncached = float(self.local_terms["compute_ms"][row]), float(self.num_tokens - self.held[row])
        return local_threshold(
            queue_ms=float(self.local_terms["queue_ms"][row]),
            token_ms=(compute_ms + float(self.local_terms["stall_ms"][row])) / uncached,
            link_ms=float(self.remote_terms["transfer_ms"][row]) / uncached,
            handoff_ms=float(self.remote_terms["handoff_ms"][row]),
            floor_tokens=self.floor_tokens,
            most_tokens=self.most_tokens,
        )


def local_threshold(
    *,
    queue_ms: float,
    token_ms: float,
    link_ms: float,
    handoff_ms: float,
    floor_tokens: int,
    most_tokens: int | None = None,
) -> float:
    """Uncached tokens up to which computing them on the decode worker costs no more than a hand-off.

    `token_ms`: what each costs there, the delay of its streams included. `handoff_ms`: all that a hand-off costs but
    for the bytes of these tokens: its fixed cost, the queue on the prefill worker and its computing. Infinite where
    each token more makes the hand-off dearer still. Never less than `floor_tokens`, and where there is anybody to hand
    over from, otherwise never more than `most_tokens`.
    """
    slope, ahead = token_ms - link_ms, handoff_ms - queue_ms
    equal = ahead / slope if slope > 0.0 else inf if ahead >= 0.0 else 0.0
    if most_tokens is not None and handoff_ms < inf:
        equal = min(equal, most_tokens)
    return max(float(floor_tokens), equal)


def prefill_ms(pool: PoolView, model: CostModel) -> Floats:
    """Per token, for every worker."""
    return _complete(pool, "prefill_ms", pool.prefill_ms, 1e3 / model.prior_prefill_tokens_per_s)


def step_ms(pool: PoolView, model: CostModel) -> Floats:
    """Of a decode step, for every worker."""
    return _complete(pool, "step_ms", pool.step_ms, 1e3 * model.prior_decode_step_s)


def link_ms(pool: PoolView, model: CostModel) -> Floats:
    """Per token whose KV has to land, for every worker."""
    if "link_ms" not in pool.unmeasured or (pool.link_ms > 0.0).any():
        return _complete(pool, "link_ms", pool.link_ms, 0.0)
    return pool.roster.kv_token_bytes * (1e3 / model.prior_kv_bytes_per_s)


def _complete(pool: PoolView, name: str, column: Floats, prior: float) -> Floats:
    """Who has not measured is taken for the mean of those of the pool that have."""
    if name not in pool.unmeasured:
        return column
    known = column > 0.0
    return np.where(known, column, column[known].mean() if known.any() else prior)
