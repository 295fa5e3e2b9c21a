"""Reports of a live planner's rounds: a line of text or JSON for each, and metrics."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.planner.controller import Outcome, PlanningRound
from cluster.planner.values import ActionKind, Sizes
from cluster.terminal_text import without_controls
from tandem.values.roles import WorkerRole

_QUIET = {Outcome.STEADY}


class RoundReporter:
    """Reports every round as JSON, or those with news as text."""

    def __init__(self, say: Callable[[str], None], metrics: "PlannerMetrics", *, as_json: bool) -> None:
        self._say = say
        self._metrics = metrics
        self._as_json = as_json
        self._last_reported: tuple[object, ...] = ()

    def turn(self, turn: PlanningRound) -> None:
        """Report a round and publish its metrics."""
        self._metrics.publish(turn)
        if self._as_json:
            self._say(json.dumps(as_json(turn)))
            return
        actions = () if turn.decision is None else turn.decision.actions
        # A silent router, or demand that cannot be met, is news once and not in every period.
        news = (turn.outcome, actions, turn.why[0] if turn.outcome is Outcome.UNSEEN else None)
        if turn.outcome is Outcome.ORDERED or (news != self._last_reported and not self._is_quiet(turn)):
            self._say(without_controls(words(turn)))
        self._last_reported = news

    def done(self, seconds: float, sizes: Sizes) -> None:
        """Report an order that was carried out."""
        self._metrics.orders.labels("done").inc()
        self._report("done", f"order carried out in {seconds:.1f} s: {sizes}")

    def failed(self, why: str) -> None:
        """Report an order that failed."""
        self._metrics.orders.labels("failed").inc()
        self._report("failed", f"order FAILED: {why}")

    def _report(self, outcome: str, text: str) -> None:
        text = without_controls(text)
        self._say(
            json.dumps({"at": _now(), "outcome": outcome, "why": [text]}) if self._as_json else f"{_now()} {text}"
        )

    def _is_quiet(self, turn: PlanningRound) -> bool:
        # The first round without trouble reports that there is none.
        return (
            turn.outcome in _QUIET
            and bool(self._last_reported)
            and self._last_reported[0] in (*_QUIET, Outcome.ORDERED)
        )


def words(turn: PlanningRound) -> str:
    sizes = "?:?" if turn.sizes is None else str(turn.sizes)
    what = _WORDS[turn.outcome]
    if turn.decision is not None and turn.decision.actions:
        what += ": " + ", ".join(map(str, turn.decision.actions))
    return f"{_now()} {sizes:>5} {what}  ({'; '.join(turn.why)})"


_WORDS = {
    Outcome.STEADY: "steady",
    Outcome.ORDERED: "ordered",
    Outcome.WOULD_ORDER: "would order",
    Outcome.UNSEEN: "no action, the load is unknown",
    Outcome.UNKNOWN: "no action",
    Outcome.UNDER_WAY: "no other action",
    Outcome.WAITING: "no action yet",
    Outcome.OTHERS: "no action",
}


def as_json(turn: PlanningRound) -> dict[str, Any]:
    record: dict[str, Any] = {"at": _now(), "outcome": turn.outcome.value, "why": list(turn.why)}
    if turn.sizes is not None:
        record["sizes"] = _sizes(turn.sizes)
    if turn.starting is not None:
        record["starting"] = _sizes(turn.starting)
    if turn.decision is not None:
        record["wanted"] = _sizes(turn.decision.wanted)
        record["actions"] = [str(action) for action in turn.decision.actions]
    if turn.order is not None:
        record["order"] = _sizes(turn.order.after)
    if turn.seen is not None:
        seen = turn.seen
        record["seen"] = {
            "period_s": round(seen.period_s, 3),
            "requests": seen.demand.num_requests,
            "answers": seen.demand.num_answers,
            "first_tokens": seen.num_first,
            "late": seen.num_late,
            "waiting_prompt_seconds": round(seen.waiting_prompt_seconds, 3),
        }
    return record


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {role.value: sizes.size_of(role) for role in WorkerRole}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class PlannerMetrics:
    """Prometheus metrics of the planner, in a registry of their own."""

    def __init__(self, *, period_s: float) -> None:
        self.registry = CollectorRegistry()
        self._wanted = self._gauge("tandem_planner_wanted_workers", "Workers that the forecast requires", "pool")
        self._fleet = self._gauge("tandem_planner_fleet_workers", "Workers that the pool should have", "pool")
        self._turns = self._counter("tandem_planner_turns", "Planning rounds by outcome", "outcome")
        self._actions = self._counter("tandem_planner_actions", "Scaling actions ordered", "kind", "pool")
        self.orders = self._counter(
            "tandem_planner_orders", "Scaling orders that ended, by outcome: done or failed", "outcome"
        )
        self._rate = Gauge(
            "tandem_planner_requests_per_second", "Request rate in the last observed period", registry=self.registry
        )
        self._seen = Gauge(
            "tandem_planner_last_seen_timestamp_seconds",
            "Unix time of the planner's last successful observation",
            registry=self.registry,
        )
        # Alerts compare the age of the last observation with the period.
        Gauge("tandem_planner_period_seconds", "Seconds between two planning rounds", registry=self.registry).set(
            period_s
        )
        for outcome in Outcome:
            self._turns.labels(outcome.value)
        for kind in ActionKind:
            for role in WorkerRole:
                self._actions.labels(kind.value, role.value)
        for outcome_of_order in ("done", "failed"):
            self.orders.labels(outcome_of_order)

    def publish(self, turn: PlanningRound) -> None:
        self._turns.labels(turn.outcome.value).inc()
        for role in WorkerRole:
            if turn.sizes is not None:
                self._fleet.labels(role.value).set(turn.sizes.size_of(role))
            if turn.decision is not None:
                self._wanted.labels(role.value).set(turn.decision.wanted.size_of(role))
        if turn.seen is not None:
            self._rate.set(turn.seen.demand.num_requests / turn.seen.period_s)
            self._seen.set_to_current_time()
        if turn.outcome is Outcome.ORDERED and turn.decision is not None:
            for action in turn.decision.actions:
                self._actions.labels(action.kind.value, action.role.value).inc()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
