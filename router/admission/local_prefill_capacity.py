"""Which prompts decode workers would read themselves at this moment, by placement's own costs. Pure.

Placement weighs a hand-off against what reading a prompt on the decode worker costs the streams there, so the longer
the prefill pool's queue, the longer the prompts that it places without it. Nothing is known here of what is cached.
"""

from dataclasses import dataclass

import numpy as np

from router.placement.costs import CostModel, link_ms, prefill_ms
from router.workers.columns import Bools, ClusterView, Floats, Ints

_least, _most, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefillCapacity:
    """What decode workers with a place can read besides."""

    most_tokens: float
    """The longest prompt that one of them would read itself."""
    always_tokens: int
    """The longest that they read whatever the prefill pool has to do."""
    slack_tokens: float
    """Prompt tokens that they may have ahead besides; at or below 0 they have enough to read."""
    tokens_per_s: float
    """That they read together."""
    wait_s: float
    """Until the one that is first done with its prompts is done."""

    def reads(self, num_tokens: int) -> bool:
        """Whether such a prompt would be read there."""
        return num_tokens <= self.most_tokens


def local_prefill_capacity(
    view: ClusterView, model: CostModel, rows: Ints, *, backlog_s: float, transit_tokens: float, now_s: float
) -> LocalPrefillCapacity | None:
    """Of the decode workers in `rows`; None: there are none. `backlog_s`: of reading, that each may have ahead.

    `transit_tokens`: of prompts that had their turn and are not placed yet.
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
    """Tokens up to which reading costs no more than a hand-off, worker by worker; see
    `router.placement.costs.local_threshold`.

    Here the partner's computing grows with the prompt as well.
    """
    pool = view.decode
    partners = [_partner(view, model, able, now_s) for able in view.partners]
    kinds = pool.roster.kinds[rows]
    wait_ms, partner_ms = (np.array(column)[kinds] for column in zip(*partners, strict=True))
    token_ms = prefill_ms(pool, model)[rows]
    ahead = wait_ms + model.handoff_ms - pool.backlog[rows] * token_ms
    stalled = 1.0 + np.maximum(pool.active[rows], 1.0) * model.stall_share
    slope = token_ms * stalled - link_ms(pool, model)[rows] - partner_ms
    rising = slope > 0.0
    equal = np.where(rising, ahead / np.where(rising, slope, 1.0), np.where(ahead >= 0.0, np.inf, 0.0))
    if model.max_local_prefill_tokens is not None:
        equal = np.where(wait_ms < np.inf, np.minimum(equal, model.max_local_prefill_tokens), equal)
    # Who has no partner reads all that it is given; beside one who has, that makes no long prompt a short one.
    paired = wait_ms < np.inf
    if paired.any():
        equal = np.where(paired, equal, 0.0)
    thresholds: Floats = np.maximum(equal, model.local_prefill_tokens)
    return thresholds


def _partner(view: ClusterView, model: CostModel, able: Bools | None, now_s: float) -> tuple[float, float]:
    """Of the prefill worker that would begin first for one kind of decode worker: until then, and per token; in ms."""
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
