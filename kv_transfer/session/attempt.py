"""The shell around the state machine of one attempt: executes its actions in order and feeds the answers back.

It also counts the attempt's outcome, records in its trace, if there is one, everything the machine processes, and logs
every end other than a commit.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.protocol.actions import Action, Actions
from kv_transfer.protocol.failure_reasons import end_reason
from kv_transfer.protocol.messages import Body, HandoffEnvelope, PrefillJob, TransferKey
from kv_transfer.protocol.states import LIVE, HandoffState
from kv_transfer.session.attempt_trace import AttemptTrace
from kv_transfer.session.stats import AttemptOutcome, AttemptTally
from tandem.telemetry.logs import about

log = logging.getLogger(__name__)


class AttemptPlan(Protocol):
    """Parameters of an attempt that both halves have."""

    @property
    def key(self) -> TransferKey: ...

    @property
    def job(self) -> PrefillJob: ...


class AttemptMachine(Protocol):
    """Interface that both halves of a hand-off share."""

    @property
    def plan(self) -> AttemptPlan:
        """Parameters of the attempt."""

    @property
    def state(self) -> HandoffState: ...

    def on_message(self, envelope: HandoffEnvelope, now: float) -> Actions:
        """Process a message from the peer."""

    def on_event(self, event: Any, now: float) -> Actions:
        """Process a local event."""

    def on_timer(self, now: float) -> Actions:
        """Expire what has run out of time."""


MachineT = TypeVar("MachineT", bound=AttemptMachine)
EventT = TypeVar("EventT")


class Attempt(ABC, Generic[MachineT, EventT]):
    """Runs one machine; a subclass knows how to execute its actions."""

    def __init__(
        self, machine: MachineT, *, now: Callable[[], float], tally: AttemptTally, trace: AttemptTrace | None
    ) -> None:
        self.machine = machine
        self._now = now
        self._tally = tally
        self._trace = trace
        self._live = True
        self._closed = False
        self._started = False

    @property
    def key(self) -> TransferKey:
        return self.machine.plan.key

    def start(self) -> None:
        """Start the machine, once."""
        if not self._started:
            self._started = True
            self._run(self._begin(), None)

    def on_message(self, envelope: HandoffEnvelope) -> None:
        """Process a message for this hand-off."""
        self._run(self.machine.on_message(envelope, self._now()), envelope.body)

    def on_event(self, event: EventT) -> None:
        if not self._closed:
            self._run(self.machine.on_event(event, self._now()), event)

    def on_timer(self, now: float) -> None:
        self._run(self.machine.on_timer(now), None)

    def _run(self, actions: Actions, cause: Body | EventT | None) -> None:
        """Execute the machine's answer to `cause`; None: its start or its timer."""
        self._note(cause)
        queue = deque(actions)
        while queue:
            event = self._execute(queue.popleft())
            if event is not None:
                queue.extend(self.machine.on_event(event, self._now()))
                self._note(event)
        if self.machine.state is HandoffState.CLOSED and not self._closed:
            self._closed = True
            self._on_closed()

    def _note(self, cause: Body | EventT | None) -> None:
        if self._trace is not None and cause is not None:
            self._trace.record(cause)
        if self._live and self.machine.state not in LIVE:
            self._live = False
            self._on_given_up()
            outcome = self._outcome(cause)
            if outcome is not None:
                self._end(outcome)
                self._log_end(outcome, cause)

    def _end(self, outcome: AttemptOutcome) -> None:
        """Count the outcome now: the blocks of a failed attempt may stay for a long time."""
        self._tally.end(outcome, self._transport_name())
        if self._trace is not None:
            self._trace.ended(self._tally, self._transport_name())

    def _log_end(self, outcome: AttemptOutcome, cause: Body | EventT | None) -> None:
        if outcome is AttemptOutcome.COMMITTED:
            return
        job = self.machine.plan.job
        details = "fetch" if job.fetch else "hand-off", self.key.transfer_id, self.key.attempt, outcome.value
        log.info("%s %s, attempt %d, %s: %s", *details, end_reason(cause), extra=about(job.request_id))

    def _on_given_up(self) -> None:
        """Called once when the machine stops being live; from then on only pending work has to end."""

    @abstractmethod
    def _outcome(self, cause: Body | EventT | None) -> AttemptOutcome | None:
        """The outcome once the machine is no longer live; None while undecided."""

    @abstractmethod
    def _transport_name(self) -> str:
        """Transport of the attempt's link."""

    @abstractmethod
    def _begin(self) -> Actions:
        """The machine's first actions."""

    @abstractmethod
    def _execute(self, action: Action) -> EventT | None:
        """Execute an action; returns the answer if it is available at once."""

    @abstractmethod
    def _on_closed(self) -> None:
        """Called once when nothing of the attempt is left."""
