"""A log of the last placements and their outcomes: the reason, the candidates, and what was really cached. Pure.

A decision keeps the arrays that it was made from; candidates are built only when the log is read. It holds counts,
worker names and the request's id: never a prompt, a token or a block name.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from math import isfinite
from typing import Any, Protocol

from msgspec import Struct

from router.placement.costs import CandidateCost
from router.placement.worker_selection import Placement
from tandem.values.ids import RequestId, WorkerId

CANDIDATES_SHOWN = 16
"""The cheapest candidates shown of each pool."""


class PlacementObserver(Protocol):
    """Counts placements; called on the event loop, so calls must be quick."""

    def decided(self, *, reason: str, affinity: str, seconds: float) -> None:
        """Count a placed choice and the time that placing it took."""
        ...

    def compared(self, *, predicted_tokens: int, actual_tokens: int) -> None:
        """Compare the prompt tokens predicted to be cached with those that were."""
        ...


class PlacementDecision(Struct, kw_only=True):
    """One placement. The Placer that made it adds the outcome."""

    request_id: RequestId
    """Id of the choice: the request's id, a dash, and the choice's index."""
    tenant: str
    """The request's tenant, who may see the decision."""
    at_s: float
    """Time on the registry's clock."""
    num_tokens: int
    placement: Placement
    holder: str | None
    """The worker named to fetch a prefix from."""
    seconds: float
    """Time that the decision took."""
    actual_cached_tokens: int | None = None
    """Cached tokens as reported; None until the first token arrives, or for ever if none does."""
    rerouted: tuple[WorkerId, ...] = ()
    """Prefill workers chosen instead, each after a failed hand-off."""


class DecisionLog:
    def __init__(self, most: int, *, clock: Callable[[], float]) -> None:
        """Keep the last `most` decisions; none when 0. `clock`: the decisions' clock, to compute their age."""
        self.most = most
        self._clock = clock
        self._decisions: deque[PlacementDecision] = deque(maxlen=most)
        self.add = self._decisions.append
        """Adds a decision, dropping the oldest if full."""

    def num_kept(self, tenant: str) -> int:
        return sum(decision.tenant == tenant for decision in self._decisions)

    def newest(self, most: int) -> Iterator[PlacementDecision]:
        """Yield decisions of all tenants, newest first."""
        return islice(reversed(self._decisions), most)

    def described(self, tenant: str, *, limit: int, request_id: str | None = None) -> list[dict[str, Any]]:
        """Return decisions as JSON objects; see `latest`."""
        now_s = self._clock()
        return [describe(decision, now_s) for decision in self.latest(tenant, limit=limit, request_id=request_id)]

    def latest(self, tenant: str, *, limit: int, request_id: str | None = None) -> Iterator[PlacementDecision]:
        """Yield a tenant's decisions, newest first; `request_id`: of a request, for all its choices, or of one
        choice."""
        for decision in reversed(self._decisions):
            if limit == 0:
                return
            if decision.tenant == tenant and (request_id is None or _is_of(decision.request_id, request_id)):
                limit -= 1
                yield decision


def _is_of(choice: str, request_id: str) -> bool:
    return choice == request_id or choice.rpartition("-")[0] == request_id


def describe(decision: PlacementDecision, now_s: float) -> dict[str, Any]:
    """Convert a decision to JSON. Milliseconds are predictions, except `decided_in_us`."""
    placement, prefill = decision.placement, decision.placement.prefill
    chosen = {placement.decode.info.key, placement.computing.info.key}
    shown = (*placement.decode_candidates[:CANDIDATES_SHOWN], *placement.prefill_candidates[:CANDIDATES_SHOWN])
    return {
        "request_id": decision.request_id,
        "age_s": round(now_s - decision.at_s, 3),
        "decided_in_us": round(decision.seconds * 1e6, 1),
        "num_tokens": decision.num_tokens,
        "reason": placement.reason.value,
        "affinity": placement.affinity.value,
        "decode_worker": placement.decode.info.key.worker_id,
        "prefill_worker": None if prefill is None else prefill.info.key.worker_id,
        "prefix_holder": decision.holder,
        "rerouted_to": list(decision.rerouted),
        "predicted_cached_tokens": placement.cached_tokens,
        "actual_cached_tokens": decision.actual_cached_tokens,
        "replicate_tokens": placement.replicate_tokens,
        "predicted_ms": round(placement.predicted_ms, 3),
        "num_candidates": len(placement.decode_candidates) + len(placement.prefill_candidates),
        "candidates": [{**_shown(cost), "chosen": cost.key in chosen} for cost in shown],
    }


def _shown(cost: CandidateCost) -> dict[str, Any]:
    """Convert a cost to JSON, leaving out terms that are zero, as most are."""
    terms = {name: round(value, 3) for name, value in asdict(cost).items() if name.endswith("_ms") and value}
    threshold = cost.local_threshold_tokens
    return {
        "worker": cost.key.worker_id,
        "role": cost.role.value,
        "matched_tokens": cost.matched_tokens,
        "total_ms": round(cost.total_ms, 3),
        **terms,
        # Where a hand-off never pays there is no threshold: JSON has no infinity.
        "local_threshold_tokens": round(threshold, 1) if threshold is not None and isfinite(threshold) else None,
    }
