"""The choices for which every worker was too full, in the order in which they are offered room."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.admission.types import RefusedMemory
from router.types.worker_view import WorkerSnapshot
from tandem.values.roles import WorkerRole


class WaitingPosition(NamedTuple):
    """A choice's position: by priority, then by when it first waited."""

    priority: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiter:
    num_tokens: int
    wake: Callable[[], None]


class WaitingChoices:
    """Wakes the choices that fit when a load report shows room, instead of polling. Without I/O.

    Bounded by admission: only accepted requests wait. Being woken promises nothing; a choice that is refused again
    waits again.
    """

    def __init__(self) -> None:
        self._waiters: dict[WaitingPosition, _Waiter] = {}
        self._num_places = 0
        self._total_tokens = 0
        self._least_tokens: int | None = None
        """None: to be found again, since the smallest has left."""

    def __len__(self) -> int:
        return len(self._waiters)

    def memory(self) -> RefusedMemory:
        """Return what they wait for; there is at least one."""
        if self._least_tokens is None:
            self._least_tokens = min(waiter.num_tokens for waiter in self._waiters.values())
        return RefusedMemory(least_tokens=self._least_tokens, total_tokens=self._total_tokens)

    def new_place(self, priority: int) -> WaitingPosition:
        """Return a position behind all others of the same priority."""
        self._num_places += 1
        return WaitingPosition(priority, self._num_places)

    def enter(self, place: WaitingPosition, num_tokens: int, wake: Callable[[], None]) -> None:
        """Wait for KV of `num_tokens`; `wake` is called at most once."""
        self.leave(place)
        if not self._waiters:
            self._least_tokens = num_tokens
        elif self._least_tokens is not None:
            self._least_tokens = min(self._least_tokens, num_tokens)
        self._waiters[place] = _Waiter(num_tokens=num_tokens, wake=wake)
        self._total_tokens += num_tokens

    def leave(self, place: WaitingPosition) -> None:
        """Wait no longer; no-op for one that was woken."""
        if place in self._waiters:
            self._remove(place)

    def on_load(self, worker: WorkerSnapshot) -> None:
        """Handle a load report: wake the first choices, as far as the worker's room goes.

        A worker with a queue of its own has no room. Large choices are not overtaken here, or they would starve.
        """
        load, info = worker.load, worker.info
        if info.role is not WorkerRole.DECODE or worker.draining or load.num_waiting:
            return
        free = load.num_free_blocks
        for place in sorted(self._waiters):
            free -= info.blocks_for(self._waiters[place].num_tokens)
            if free < 0:
                return
            self._remove(place).wake()

    def _remove(self, place: WaitingPosition) -> _Waiter:
        waiter = self._waiters.pop(place)
        self._total_tokens -= waiter.num_tokens
        if waiter.num_tokens == self._least_tokens:
            self._least_tokens = None
        return waiter
