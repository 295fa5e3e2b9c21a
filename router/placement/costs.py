"""The inputs of placement's predictions: bounds and priors, rates by column, and what one worker costs. Pure."""

from dataclasses import dataclass
from math import inf

import numpy as np
from msgspec import Struct

from router.types.worker_view import WorkerKey
from router.workers.columns import Floats, PoolView
from tandem.values.roles import WorkerRole

_or, _sum = np.logical_or.reduce, np.add.reduce


class CostModel(Struct, frozen=True, kw_only=True):
    """Bounds and priors of the cost model; a prior is used for a rate until a worker of the pool has measured it."""

    local_prefill_tokens: int = 64
    """Uncached tokens up to which the decode worker computes the prompt itself, whatever a hand-off costs."""
    max_local_prefill_tokens: int | None = None
    """Uncached tokens beyond which it never does so if a prefill worker is available; None: whichever is cheaper."""
    handoff_ms: float = 1.0
    """Fixed cost of a hand-off beside queue, computation and bytes: messages between three processes."""
    stall_share: float = 1.0
    """Share of the time in which a decode worker computes a prompt that each of its streams is assumed to lose; an idle
    worker counts as having one stream, for the next is never far."""
    recompute_weight: float = 8.0
    """Cost to others of each millisecond spent recomputing what another worker of the pool has cached, per request of
    an average worker: in an M/M/1 queue that many requests wait for it, which gives 1, and it also evicts their blocks.
    The Mooncake traces wait least between 4 and 8; higher weights find more in the caches."""
    prior_prefill_tokens_per_s: float = 5_000.0
    prior_decode_step_s: float = 0.02
    prior_kv_bytes_per_s: float = 1e9
    adapter_bytes_per_s: float = 200e6
    """Rate at which a worker loads an adapter."""
    adapter_load_ms: float = 20.0
    """What a load takes beside its bytes: reading and laying out many small matrices, and a place between two steps."""
    itl_share: float = 0.02
    """Share by which one more sequence lengthens a decode step."""
    itl_horizon_tokens: int = 64
    """Tokens over which the effect on inter-token latency is counted."""
    tie_ms: float = 0.5
    tie_share: float = 0.02
    """Costs within `tie_ms` plus this share are equal: predictions are no more accurate than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCost:
    """One worker's predicted cost, in milliseconds."""

    key: WorkerKey
    role: WorkerRole
    matched_tokens: int
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    stall_ms: float = 0.0
    """Delay of the worker's present streams while it computes the prompt."""
    recompute_ms: float = 0.0
    """Cost to others of recomputing here what another worker of the pool has cached."""
    transfer_ms: float = 0.0
    pair_ms: float = 0.0
    """Cost added by the link from the best prefill worker, negative if it saves; see `router.workers.pair_links`."""
    handoff_ms: float = 0.0
    """All other costs of the best prefill worker and the hand-off from it."""
    memory_ms: float = 0.0
    itl_ms: float = 0.0
    penalty_ms: float = 0.0
    """Time left for which the worker should be avoided after a refusal or failure."""
    adapter_ms: float = 0.0
    """Time to load the request's adapter, where it is not resident."""
    copy_ms: float = 0.0
    """Negative: the part that is not charged because a copy is wanted here."""
    local_threshold_tokens: float | None = None
    """Uncached tokens up to which a decode worker would have computed the prompt itself."""

    @property
    def total_ms(self) -> float:
        """The sum that is minimised."""
        return (
            self.queue_ms + self.compute_ms + self.stall_ms + self.recompute_ms + self.transfer_ms + self.pair_ms
            + self.handoff_ms + self.memory_ms + self.itl_ms + self.penalty_ms + self.adapter_ms + self.copy_ms
        )  # fmt: skip


def local_threshold(
    *,
    queue_ms: float,
    token_ms: float,
    link_ms: float,
    handoff_ms: float,
    floor_tokens: int,
    most_tokens: int | None = None,
) -> float:
    """Return the number of uncached tokens up to which local prefill costs no more than a hand-off.

    `token_ms`: cost of each token there, including the delay of its streams. `handoff_ms`: everything that a hand-off
    costs but the bytes of these tokens: its fixed cost, the queue on the prefill worker and its computation. Infinite
    where each further token makes the hand-off even dearer. Never less than `floor_tokens`, and otherwise, where a
    prefill worker exists, never more than `most_tokens`.
    """
    slope, ahead = token_ms - link_ms, handoff_ms - queue_ms
    equal = ahead / slope if slope > 0.0 else inf if ahead >= 0.0 else 0.0
    if most_tokens is not None and handoff_ms < inf:
        equal = min(equal, most_tokens)
    return max(float(floor_tokens), equal)


def prefill_ms(pool: PoolView, model: CostModel) -> Floats:
    """Return the prefill time per token of every worker."""
    if "prefill_ms" not in pool.unmeasured:
        return pool.prefill_ms
    return _complete(pool.prefill_ms, 1e3 / model.prior_prefill_tokens_per_s)


def step_ms(pool: PoolView, model: CostModel) -> Floats:
    """Return the decode step time of every worker."""
    if "step_ms" not in pool.unmeasured:
        return pool.step_ms
    return _complete(pool.step_ms, 1e3 * model.prior_decode_step_s)


def link_ms(pool: PoolView, model: CostModel) -> Floats:
    """Return the transfer time per token whose KV must arrive, for every worker."""
    if "link_ms" not in pool.unmeasured:
        return pool.link_ms
    if _or(pool.link_ms > 0.0):
        return _complete(pool.link_ms, 0.0)
    return pool.members.kv_token_bytes * (1e3 / model.prior_kv_bytes_per_s)


def _complete(column: Floats, prior: float) -> Floats:
    """Fill in the mean of the pool's measured rates for workers without one."""
    known = column > 0.0
    measured = column[known]
    # As `mean` does, which takes three times as long.
    return np.where(known, column, _sum(measured) / len(measured) if len(measured) else prior)


def filled_in(rates: list[float], prior: float) -> list[float]:
    """Fill in the mean of the measured rates likewise, for few workers.

    Fewer than eight numbers are added in numpy's order, one after the other: the mean equals that of a column.
    """
    num_known, total = 0, 0.0
    for rate in rates:
        if rate > 0.0:
            num_known, total = num_known + 1, total + rate
    mean = total / num_known if num_known else prior
    return [rate if rate > 0.0 else mean for rate in rates]
