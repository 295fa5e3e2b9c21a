"""Which prompts decode workers would prefill themselves at this moment, by placement's own costs. Pure.

Placement weighs a hand-off against what prefilling on the decode worker costs the streams there, so the longer the
prefill pool's queue, the longer the prompts that it places without it. What is cached is unknown here.
"""

import numpy as np
from msgspec import Struct

from router.placement.costs import CostModel, link_ms, prefill_ms
from router.workers.columns import Bools, ClusterView, Floats, Ints

_least, _most, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce


class LocalPrefillCapacity(Struct, frozen=True, kw_only=True):
    """Further prompt work that decode workers with a free slot can take."""

    most_tokens: float
    """The longest prompt that one of them would prefill itself."""
    always_tokens: int
    """The longest prompt that they prefill however idle the prefill pool is."""
    slack_tokens: float
    """Further prompt tokens that they may have queued; at or below 0 they have enough work."""
    tokens_per_s: float
    """Their combined prefill rate."""
    wait_s: float
    """Seconds until the first of them has finished its queued prompts."""

    def reads(self, num_tokens: int) -> bool:
        """Whether such a prompt would be prefilled there."""
        return num_tokens <= self.most_tokens


def local_prefill_capacity(
    view: ClusterView, model: CostModel, rows: Ints, *, backlog_s: float, transit_tokens: float, now_s: float
) -> LocalPrefillCapacity | None:
    """Compute it for the decode workers in `rows`; None: there are none. `backlog_s`: prefill work that each may have
    queued.

    `transit_tokens`: prompt tokens of requests that had their turn and are not placed yet.
    """
    if not len(rows):
        return None
    rates = 1e3 / prefill_ms(view.decode, model)[rows]
    backlogs = view.decode.backlog_now[rows]
    return LocalPrefillCapacity(
        most_tokens=float(_most(_thresholds(view, model, rows, now_s))),
        always_tokens=model.local_prefill_tokens,
        slack_tokens=float(_sum(np.maximum(backlog_s * rates - backlogs, 0.0))) - transit_tokens,
        tokens_per_s=float(_sum(rates)),
        wait_s=float(_least(backlogs / rates)),
    )


def _thresholds(view: ClusterView, model: CostModel, rows: Ints, now_s: float) -> Floats:
    """Compute per worker the prompt length up to which local prefill costs no more than a hand-off; see
    `router.placement.costs.local_threshold`.

    Here the partner's computation grows with the prompt as well.
    """
    pool = view.decode
    partners = [_partner(view, model, able, now_s) for able in view.partners]
    kinds = pool.members.kinds[rows]
    wait_ms, partner_ms = (np.array(column)[kinds] for column in zip(*partners, strict=True))
    token_ms = prefill_ms(pool, model)[rows]
    ahead = wait_ms + model.handoff_ms - pool.backlog[rows] * token_ms
    stalled = 1.0 + np.maximum(pool.active[rows], 1.0) * model.stall_share
    slope = token_ms * stalled - link_ms(pool, model)[rows] - partner_ms
    rising = slope > 0.0
    equal = np.where(rising, ahead / np.where(rising, slope, 1.0), np.where(ahead >= 0.0, np.inf, 0.0))
    if model.max_local_prefill_tokens is not None:
        equal = np.where(wait_ms < np.inf, np.minimum(equal, model.max_local_prefill_tokens), equal)
    # Without a partner a worker prefills everything it is given; beside one that has a partner, that makes no long
    # prompt short.
    paired = wait_ms < np.inf
    if paired.any():
        equal = np.where(paired, equal, 0.0)
    thresholds: Floats = np.maximum(equal, model.local_prefill_tokens)
    return thresholds


def _partner(view: ClusterView, model: CostModel, able: Bools | None, now_s: float) -> tuple[float, float]:
    """Return when the first prefill worker for one kind of decode worker could begin, and its time per token; both in
    ms."""
    pool = view.prefill
    token_ms = prefill_ms(pool, model)
    wait_ms = pool.backlog * token_ms
    if pool.penalised_until_s is not None:
        wait_ms = wait_ms + np.maximum(pool.penalised_until_s - now_s, 0.0) * 1e3
    for allowed in (able, pool.open):
        if allowed is not None:
            wait_ms = np.where(allowed, wait_ms, np.inf)
    if not len(wait_ms):
        return np.inf, 0.0
    row = int(wait_ms.argmin())
    return float(wait_ms[row]), float(token_ms[row])
