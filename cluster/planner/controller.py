"""Turn by turn, what a planner does with a live cluster: nothing, unless everything is known and nobody is in between.

Pure. The planner is told every period that was seen, whether or not anything may be done, so its forecast and what it
remembers go on. No order is given when routers or the fleet cannot be asked, while an order is under way, for a while
after one that failed, and when somebody else has changed the sizes: theirs are kept for a whole hold, but for growth.
"""

from dataclasses import dataclass
from enum import Enum

from cluster.planner.load_watch import Unseen
from cluster.planner.orders import Order
from cluster.planner.planner import Planner
from cluster.planner.values import Decision, FleetView, Observation, Sizes

_MOST_WAIT_S = 600.0
"""Between two tries of a fleet that refuses."""


class Outcome(Enum):
    """What a turn came to; a label."""

    STEADY = "steady"
    """All is as it should be."""
    ORDERED = "ordered"
    WOULD_ORDER = "would_order"
    """In a dry run."""
    UNSEEN = "unseen"
    """Routers could not be asked."""
    UNKNOWN = "unknown"
    """The fleet could not be asked."""
    UNDER_WAY = "under_way"
    WAITING = "waiting"
    """After an order that failed."""
    OTHERS = "others"
    """Somebody else has changed the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One look and what came of it."""

    at_s: float
    outcome: Outcome
    why: tuple[str, ...]
    sizes: Sizes | None = None
    """Before it; None: not known."""
    starting: Sizes | None = None
    """On their way, of these."""
    decision: Decision | None = None
    """None: the period was not seen."""
    order: Order | None = None
    """To be carried out now; of a dry run, what would be."""
    seen: Observation | None = None


class Controller:
    """One cluster's. After a turn with an order, `done` or `failed` must be told before the next one is given."""

    def __init__(self, planner: Planner, *, is_dry_run: bool, retry_s: float) -> None:
        """`retry_s`: after a first order that failed; doubles with each that follows."""
        self._planner = planner
        self._is_dry_run = is_dry_run
        self._retry_s = retry_s
        self._num_failed = 0
        self._wait_until_s = -1.0
        self._under_way: Order | None = None
        self._expected: Sizes | None = None
        """What the fleet should be, if nobody else touches it; None: whatever is found."""

    def turn(self, now_s: float, seen: Observation | Unseen, fleet: FleetView | str) -> Turn:
        """Of one period; `fleet`: or why it is not known."""
        if isinstance(seen, Unseen):
            sizes = None if isinstance(fleet, str) else fleet.sizes
            return Turn(at_s=now_s, outcome=Outcome.UNSEEN, why=(seen.why,), sizes=sizes)
        if (kept := self._no_order(now_s, fleet)) is not None:
            outcome, why = kept
            watched = self._planner.watch(now_s, seen)
            return Turn(
                at_s=now_s,
                outcome=outcome,
                why=(why, *watched.reasons),
                sizes=None if isinstance(fleet, str) else fleet.sizes,
                starting=None if isinstance(fleet, str) else fleet.starting,
                decision=watched,
                seen=seen,
            )
        assert not isinstance(fleet, str)  # noqa: S101  # narrows: `_no_order` has looked
        self._expected = fleet.sizes
        decision = self._planner.decide(now_s, seen, fleet)
        order = Order.from_actions(decision.actions, fleet.sizes) if decision.actions else None
        outcome = Outcome.STEADY
        if order is not None:
            outcome = Outcome.WOULD_ORDER if self._is_dry_run else Outcome.ORDERED
            self._under_way = None if self._is_dry_run else order
        return Turn(
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
        """The order was carried out."""
        if self._under_way is not None:
            self._expected = self._under_way.after
        self._under_way, self._num_failed = None, 0

    def failed(self, now_s: float) -> None:
        """It was not, or not whole: what is there is looked at anew."""
        self._under_way, self._expected = None, None
        self._num_failed += 1
        self._wait_until_s = now_s + min(_MOST_WAIT_S, self._retry_s * 2.0 ** (self._num_failed - 1))

    def _no_order(self, now_s: float, fleet: FleetView | str) -> tuple[Outcome, str] | None:
        """Why none may be given now, whatever the planner would like."""
        if self._under_way is not None:
            return Outcome.UNDER_WAY, f"an order to {self._under_way.after} is under way"
        if isinstance(fleet, str):
            return Outcome.UNKNOWN, f"the fleet cannot be asked: {fleet}"
        if self._expected is not None and fleet.sizes != self._expected:
            text = f"the fleet is {fleet.sizes}, and was {self._expected}: somebody else has changed it"
            self._expected = fleet.sizes
            self._planner.hold(now_s)
            return Outcome.OTHERS, text
        if now_s < self._wait_until_s:
            left_s = self._wait_until_s - now_s
            return Outcome.WAITING, f"{self._num_failed} orders in a row have failed: the next in {left_s:.0f} s"
        return None
