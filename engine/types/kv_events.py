"""Events of a worker's prefix cache for the cluster: stored, evicted, cleared, in order and numbered.

The log is drained once per step. It is bounded: when a step brings more events than it can keep, they are all
dropped and the next numbers show the gap, upon which the reader reloads the whole set (`PrefixIndex.snapshot`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.values.ids import BlockHash


class Stored(NamedTuple):
    """A full block can be found under its name, in the pool or below; its parent was stored before it."""

    name: BlockHash
    parent: BlockHash | None
    """None when it is no longer known: for a block that is only below the pool."""


class Evicted(NamedTuple):
    """A name is gone from every tier of the worker."""

    name: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Every name is gone but those stored again right after."""


KVEvent = Stored | Evicted | Cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventBatch:
    """Consecutive events. A reader whose next expected number is not `first_seq` has missed some."""

    first_seq: int
    events: tuple[KVEvent, ...]

    @property
    def next_seq(self) -> int:
        """The number that the batch after this one starts with, unless events were dropped."""
        return self.first_seq + len(self.events)


class KVEventLog:
    """Collects events between two drains, at most `capacity` of them."""

    __slots__ = ("_capacity", "_events", "_next_seq")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: list[KVEvent] = []
        self._next_seq = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def next_seq(self) -> int:
        """Number of the next event: the version of the state that all events so far describe."""
        return self._next_seq

    def append(self, event: KVEvent) -> None:
        """Number an event; beyond the capacity, drop all kept ones so that the reader sees one gap."""
        if len(self._events) == self._capacity:
            self._events.clear()
        self._events.append(event)
        self._next_seq += 1

    def drain(self) -> KVEventBatch:
        """Return the events collected since the last drain."""
        events = tuple(self._events)
        self._events.clear()
        return KVEventBatch(first_seq=self._next_seq - len(events), events=events)
