"""The choices that every worker was too full for, in the order in which room is offered to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.types.worker_view import WorkerSnapshot
from tandem.values.roles import WorkerRole


class WaitingPosition(NamedTuple):
    """Where a choice stands: by priority, then by when it first came."""

    priority: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiter:
    num_tokens: int
    wake: Callable[[], None]


class WaitingChoices:
    """Wakes those that fit when a load report shows room, so that nobody need ask often. Without I/O.

    Bounded by admission: only accepted requests wait. Being woken is no promise; who is refused again comes back.
    """

    def __init__(self) -> None:
        self._waiters: dict[WaitingPosition, _Waiter] = {}
        self._num_places = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def new_place(self, priority: int) -> WaitingPosition:
        """A place behind all of the same priority."""
        self._num_places += 1
        return WaitingPosition(priority, self._num_places)

    def enter(self, place: WaitingPosition, num_tokens: int, wake: Callable[[], None]) -> None:
        """Wait for KV of `num_tokens`; `wake` is called at most once."""
        self._waiters[place] = _Waiter(num_tokens=num_tokens, wake=wake)

    def leave(self, place: WaitingPosition) -> None:
        """Wait no longer; no-op for one that was woken."""
        self._waiters.pop(place, None)

    def on_load(self, worker: WorkerSnapshot) -> None:
        """A load report came: wake the first ones, as far as its room goes.

        A worker with a queue of its own has room for nobody. Large ones are not overtaken here: they would starve.
        """
        load, block_size = worker.load, worker.info.layout.block_size
        if worker.info.role is not WorkerRole.DECODE or worker.draining or load.num_waiting:
            return
        free = load.num_free_blocks
        for place in sorted(self._waiters):
            free -= -(-self._waiters[place].num_tokens // block_size)
            if free < 0:
                return
            self._waiters.pop(place).wake()
