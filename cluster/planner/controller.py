"""Applies a planner to a live cluster, round by round, but only while everything is known and no one interferes.

Pure. The planner receives every observed period, whether or not it may act, so that its forecast and history continue.
No order is given while the routers or the fleet are unknown, while an order is in progress, for a while after a failed
order, and after someone else has changed the sizes: those are kept for a whole hold time, except for growth.
"""

from dataclasses import dataclass
from enum import Enum

from cluster.planner.load_watch import Unseen
from cluster.planner.orders import Order
from cluster.planner.planner import Planner
from cluster.planner.values import Decision, FleetView, Observation, Sizes

_MOST_WAIT_S = 600.0
"""Maximum delay before the next order to a fleet that rejects orders."""


class Outcome(Enum):
    """Result of a round; a metric label."""

    STEADY = "steady"
    """Everything is as it should be."""
    ORDERED = "ordered"
    WOULD_ORDER = "would_order"
    """The order is not carried out in a dry run."""
    UNSEEN = "unseen"
    """The routers' figures are unknown."""
    UNKNOWN = "unknown"
    """The state of the fleet is unknown."""
    UNDER_WAY = "under_way"
    WAITING = "waiting"
    """The delay after a failed order has not passed."""
    OTHERS = "others"
    """Someone else has changed the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRound:
    """One observation and what came of it."""

    at_s: float
    outcome: Outcome
    why: tuple[str, ...]
    sizes: Sizes | None = None
    """Sizes before the round; None: unknown."""
    starting: Sizes | None = None
    """Workers of `sizes` that are still starting."""
    decision: Decision | None = None
    """The planner's decision; None: the period was not observed."""
    order: Order | None = None
    """Order to carry out now; in a dry run, the one that would be."""
    seen: Observation | None = None


class Controller:
    """Controls one cluster. After a round with an order, call `done` or `failed` before another order can be given."""

    def __init__(self, planner: Planner, *, is_dry_run: bool, retry_s: float) -> None:
        """`retry_s`: delay after a first failed order; it doubles with each further one."""
        self._planner = planner
        self._is_dry_run = is_dry_run
        self._retry_s = retry_s
        self._num_failed = 0
        self._wait_until_s = -1.0
        self._under_way: Order | None = None
        self._expected: Sizes | None = None
        """Expected sizes unless someone else changes them; None: accept those found."""

    def turn(self, now_s: float, seen: Observation | Unseen, fleet: FleetView | str) -> PlanningRound:
        """Run the round of one period; `fleet` is its state, or why that is unknown."""
        if isinstance(seen, Unseen):
            sizes = None if isinstance(fleet, str) else fleet.sizes
            return PlanningRound(at_s=now_s, outcome=Outcome.UNSEEN, why=(seen.why,), sizes=sizes)
        if (kept := self._no_order(now_s, fleet)) is not None:
            outcome, why = kept
            watched = self._planner.watch(now_s, seen)
            return PlanningRound(
                at_s=now_s,
                outcome=outcome,
                why=(why, *watched.reasons),
                sizes=None if isinstance(fleet, str) else fleet.sizes,
                starting=None if isinstance(fleet, str) else fleet.starting,
                decision=watched,
                seen=seen,
            )
        assert not isinstance(fleet, str)  # noqa: S101  # narrows: `_no_order` has checked
        self._expected = fleet.sizes
        decision = self._planner.decide(now_s, seen, fleet)
        order = Order.from_actions(decision.actions, fleet.sizes) if decision.actions else None
        outcome = Outcome.STEADY
        if order is not None:
            outcome = Outcome.WOULD_ORDER if self._is_dry_run else Outcome.ORDERED
            self._under_way = None if self._is_dry_run else order
        return PlanningRound(
            at_s=now_s,
            outcome=outcome,
            why=decision.reasons,
            sizes=fleet.sizes,
            starting=fleet.starting,
            decision=decision,
            order=order,
            seen=seen,
        )

    def done(self) -> None:
        """Record that the order was carried out."""
        if self._under_way is not None:
            self._expected = self._under_way.after
        self._under_way, self._num_failed = None, 0

    def failed(self, now_s: float) -> None:
        """Record that the order failed, at least in part: the fleet's actual state is then used."""
        self._under_way, self._expected = None, None
        self._num_failed += 1
        self._wait_until_s = now_s + min(_MOST_WAIT_S, self._retry_s * 2.0 ** (self._num_failed - 1))

    def _no_order(self, now_s: float, fleet: FleetView | str) -> tuple[Outcome, str] | None:
        """Return why no order may be given now, whatever the planner decides, or None."""
        if self._under_way is not None:
            return Outcome.UNDER_WAY, f"an order to {self._under_way.after} is in progress"
        if isinstance(fleet, str):
            return Outcome.UNKNOWN, f"the state of the fleet is unknown: {fleet}"
        if self._expected is not None and fleet.sizes != self._expected:
            text = f"the fleet is {fleet.sizes}, and was {self._expected}: someone else has changed it"
            self._expected = fleet.sizes
            self._planner.hold(now_s)
            return Outcome.OTHERS, text
        if now_s < self._wait_until_s:
            left_s = self._wait_until_s - now_s
            return Outcome.WAITING, f"{self._num_failed} orders in a row have failed: retrying in {left_s:.0f} s"
        return None
