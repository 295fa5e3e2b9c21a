"""The position up to which this router has read each worker's log in Redis, and how to treat its next entry. Pure.

A worker is followed from a state (all its blocks at one sequence number) through the entries of its log (numbered
changes). An entry that continues what is known is applied; one that is known already, or is not authentic, is ignored;
one that leaves a gap means that the state must be loaded again. An entry's id is the number of the change after it, so
reading resumes from the current position even after the log was lost and restarted. The worker's head reveals what no
entry does: when it stays ahead of us from one read to the next, entries were lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from router.types.worker_view import PrefixChange, WorkerKey
from tandem.cluster_state.entries import MAX_CHANGES, CacheState, Changes, Footprint

RETRY_S = 0.25
"""Seconds until a state is loaded again; doubled, up to MOST_RETRY_S, each time that it is missing or that the log
cannot be read."""
MOST_RETRY_S = 2.0


class LogEntryAction(Enum):
    """Handling of a log entry."""

    APPLY = "apply"
    IGNORE = "ignore"
    RELOAD = "reload"


class Reload(Enum):
    """Reason for loading a worker's state again."""

    START = "start"
    GAP = "gap"
    """Entries of the log were lost."""
    BEHIND = "behind"
    """The worker has published changes that were never received."""


@dataclass(slots=True)
class _Followed:
    next_sequence: int | None = None
    """Number of the next change; None before the first state."""
    position: str = "0-0"
    """Id of the last entry that was read, applied or not."""
    reload: Reload | None = Reload.START
    not_before_s: float = 0.0
    retry_s: float = RETRY_S
    seen_behind: int | None = None
    """Our position when the head was last found ahead of us."""

    def wait(self, now_s: float) -> None:
        """Load the state later, and the next time after twice as long, until an entry of the log was read."""
        self.not_before_s = now_s + self.retry_s
        self.retry_s = min(2 * self.retry_s, MOST_RETRY_S)


class LogPositions:
    """The log positions of all workers that this router has sessions with."""

    def __init__(self) -> None:
        self._followed: dict[WorkerKey, _Followed] = {}

    @property
    def followed(self) -> set[WorkerKey]:
        """The workers that are followed."""
        return set(self._followed)

    def follow(self, key: WorkerKey) -> None:
        """Start following a worker; its state is due."""
        self._followed[key] = _Followed()

    def drop(self, key: WorkerKey) -> None:
        self._followed.pop(key, None)

    def due(self, now_s: float) -> list[tuple[WorkerKey, Reload]]:
        """Return the workers whose state is due to be loaded, and why: those first that have waited longest."""
        due = [
            (each.not_before_s, key, each.reload)
            for key, each in self._followed.items()
            if each.reload is not None and each.not_before_s <= now_s
        ]
        due.sort(key=itemgetter(0))
        return [(key, reload) for _, key, reload in due]

    def positions(self) -> dict[WorkerKey, str]:
        """Return the positions to read on from, for workers that have a state."""
        return {key: each.position for key, each in self._followed.items() if each.reload is None}

    def load(self, key: WorkerKey, state: CacheState | None, now_s: float) -> Iterator[PrefixChange]:
        """Split a worker's state into changes to apply in order; None: no authentic state was found, retry later."""
        followed = self._followed.get(key)
        if followed is None:
            return iter(())
        # Also after finding a state: if it leaves another gap, it is not reloaded in a busy loop.
        if state is None:
            followed.wait(now_s)
            return iter(())
        followed.not_before_s = now_s + RETRY_S
        followed.next_sequence, followed.reload, followed.seen_behind = state.next_sequence, None, None
        followed.position = f"{state.next_sequence}-0"
        return _pieces(state)

    def entry(
        self, key: WorkerKey, entry_id: str, changes: Changes | None
    ) -> tuple[LogEntryAction, PrefixChange | None]:
        """Process one entry of a worker's log; None: it is not authentic."""
        followed = self._followed.get(key)
        if followed is None or followed.reload is not None or followed.next_sequence is None:
            return LogEntryAction.IGNORE, None
        followed.position, followed.retry_s = entry_id, RETRY_S
        due = followed.next_sequence
        if changes is None or changes.next_sequence <= due:
            return LogEntryAction.IGNORE, None
        if changes.first_sequence > due:
            followed.reload = Reload.GAP
            return LogEntryAction.RELOAD, None
        followed.next_sequence = changes.next_sequence
        fresh = changes.changes[due - changes.first_sequence :]
        return LogEntryAction.APPLY, PrefixChange(first_sequence=due, snapshot=False, changes=fresh)

    def head(self, key: WorkerKey, head: Footprint) -> LogEntryAction:
        """Compare with the head that the worker has published."""
        followed = self._followed.get(key)
        if followed is None or followed.next_sequence is None or followed.reload is not None:
            return LogEntryAction.IGNORE
        if head.next_sequence <= followed.next_sequence:
            followed.seen_behind = None
        elif followed.seen_behind == followed.next_sequence:
            followed.reload = Reload.BEHIND
            return LogEntryAction.RELOAD
        else:
            followed.seen_behind = followed.next_sequence
        return LogEntryAction.IGNORE

    def set_aside(self, key: WorkerKey, now_s: float) -> None:
        """Start again later with a worker whose log cannot be read."""
        if (followed := self._followed.get(key)) is not None:
            followed.reload = Reload.GAP
            followed.wait(now_s)


def _pieces(state: CacheState) -> Iterator[PrefixChange]:
    """Yield a snapshot, then changes numbered so that the last of them ends where the state does."""
    first_sequence, left = state.next_sequence - len(state), len(state)
    is_first = True
    for names in state.slices(MAX_CHANGES):
        left -= len(names)
        changes = tuple((name, True) for name in names)
        first = state.next_sequence - left if is_first else first_sequence
        yield PrefixChange(first_sequence=first, snapshot=is_first, changes=changes)
        first_sequence, is_first = state.next_sequence - left, False
    if is_first:
        yield PrefixChange(first_sequence=state.next_sequence, snapshot=True, changes=())
