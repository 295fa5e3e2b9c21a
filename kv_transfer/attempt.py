"""The shell around one pure state machine of an attempt: executes its actions in order and feeds the answers back."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.actions import Action, Actions
from kv_transfer.messages import Envelope
from kv_transfer.states import HandoffState


class Machine(Protocol):
    """What both halves of a hand-off have in common."""

    @property
    def state(self) -> HandoffState:
        """Where it stands."""

    def on_message(self, envelope: Envelope, now: float) -> Actions:
        """Digest a message from the peer."""

    def on_event(self, event: Any, now: float) -> Actions:
        """Digest what happened here."""

    def on_timer(self, now: float) -> Actions:
        """End what has run out of time."""


MachineT = TypeVar("MachineT", bound=Machine)
EventT = TypeVar("EventT")


class Attempt(ABC, Generic[MachineT, EventT]):
    """Runs one machine; a subclass knows how to execute its actions."""

    def __init__(self, machine: MachineT, *, now: Callable[[], float]) -> None:
        self.machine = machine
        self._now = now
        self._closed = False
        self._started = False

    def start(self) -> None:
        """Let the machine begin, once."""
        if not self._started:
            self._started = True
            self._run(self._begin())

    def on_message(self, envelope: Envelope) -> None:
        """A message for this hand-off."""
        self._run(self.machine.on_message(envelope, self._now()))

    def on_event(self, event: EventT) -> None:
        """Something happened here."""
        if not self._closed:
            self._run(self.machine.on_event(event, self._now()))

    def on_timer(self, now: float) -> None:
        """The reaper's visit."""
        self._run(self.machine.on_timer(now))

    def _run(self, actions: Actions) -> None:
        queue = deque(actions)
        while queue:
            event = self._execute(queue.popleft())
            if event is not None:
                queue.extend(self.machine.on_event(event, self._now()))
        if self.machine.state is HandoffState.CLOSED and not self._closed:
            self._closed = True
            self._on_closed()

    @abstractmethod
    def _begin(self) -> Actions:
        """Start the machine."""

    @abstractmethod
    def _execute(self, action: Action) -> EventT | None:
        """Do it; the answer, when it is there at once."""

    @abstractmethod
    def _on_closed(self) -> None:
        """Nothing of the attempt is left; called once."""
