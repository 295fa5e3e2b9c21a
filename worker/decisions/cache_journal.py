"""Plans what a worker writes to Redis so that routers read its cache correctly. Pure.

The journal mirrors the worker's names, queues changes, and plans one transaction at a time. Changes become entries of
the log; when the log since the state has grown past a bound, the state is written again with them, and entries before
the previous state are trimmed, so that a reader who is a little behind need not load everything. After a failed write,
or when Redis holds something else, the content of Redis is read to settle the doubt; what cannot be settled, or would
take too long to catch up with, is replaced by a fresh state. If little has changed since the last completed write,
those changes go into the log beside the fresh state, so that up-to-date readers need not load it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.cluster_state.entries import MAX_CHANGES, Changes, Footprint
from tandem.values.ids import BlockHash

_CHANGES_AT_ONCE = 8 * MAX_CHANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The content of one transaction."""

    entries: tuple[Changes, ...]
    """Entries to append to the log."""
    state: tuple[BlockHash, ...] | None
    """State to replace the present one, as of `after.state_sequence`; None: keep it."""
    keep_from: int | None
    """Drop log entries that end at or before this number; None: drop none."""
    is_fresh: bool
    """Whether all entries of this process are removed first."""
    after: Footprint
    """Extent of the entries after the write."""


class CacheJournal:
    """Tracks what one worker process has written to Redis, and what remains to be written."""

    def __init__(self, *, max_pending: int = 65_536, min_log: int = 4096) -> None:
        """`max_pending`: maximum number of unwritten changes; more become a fresh state.

        `min_log`: minimum number of changes in the log before the state is written again; half the size of the state if
        larger.
        """
        self._max_pending = max_pending
        self._min_log = min_log
        self._names: dict[BlockHash, None] | None = None
        self._next = 0
        self._known: Footprint | None = None
        """Extent that Redis is known to hold; None: unknown, or useless."""
        self._planned: Write | None = None
        """The write that was handed out, until it is written or given up."""
        self._is_in_doubt = False
        self._pending: deque[tuple[BlockHash, bool]] | None = None
        """Changes between the last write and the mirror, in order; None: unknown, or too many."""
        self._log: deque[int] = deque()
        """Sequence number after each entry of the log."""

    @property
    def is_behind(self) -> bool:
        """Whether changes remain to be written."""
        return self._names is not None and (self._known is None or bool(self._pending))

    @property
    def is_in_doubt(self) -> bool:
        """Whether nothing can be written before `on_read` has reported what Redis holds."""
        return self._is_in_doubt

    def restart(self, next_sequence: int, names: Sequence[BlockHash]) -> None:
        """Replace the mirror by everything that the worker holds; later changes count from `next_sequence`."""
        self._names = dict.fromkeys(names)
        self._next = next_sequence
        self._give_up()

    def apply(self, first_sequence: int, changes: Sequence[tuple[BlockHash, bool]]) -> bool:
        """Apply changes of the worker's cache. Returns False when changes are missing: the worker must `restart`."""
        names = self._names
        if names is None:
            return True  # a snapshot is on its way and will include these
        if first_sequence > self._next:
            self._names = None
            self._give_up()
            return False
        fresh = changes[self._next - first_sequence :]
        for name, stored in fresh:
            if stored:
                names[name] = None
            else:
                names.pop(name, None)
        self._next += len(fresh)
        if self._pending is not None:
            self._pending.extend(fresh)
            if len(self._pending) > self._max_pending:
                self._give_up()
        return True

    def next_write(self) -> Write | None:
        """The write to perform now; None when there is none, or the last one is neither `written` nor settled."""
        if self._names is None or self._planned is not None:
            return None
        there, pending = self._known, self._pending
        if pending is None or (there is None and len(pending) > _CHANGES_AT_ONCE):
            self._pending = pending = deque()
        if there is None:
            self._planned = self._fresh_write(self._entries(pending), self._names)
        elif pending:
            self._planned = self._append_write(there, self._entries(pending), self._names)
        return self._planned

    def written(self, write: Write) -> None:
        """Record that Redis has `write`."""
        if self._planned is not write or self._pending is None:
            return  # given up meanwhile
        self._planned, self._is_in_doubt = None, False
        if write.is_fresh:
            self._log.clear()
        for entry in write.entries:
            for _ in entry.changes:
                self._pending.popleft()
            self._log.append(entry.next_sequence)
        while write.keep_from is not None and self._log and self._log[0] <= write.keep_from:
            self._log.popleft()
        self._known = write.after

    def mark_in_doubt(self) -> None:
        """Record a failure after which it is unknown whether Redis has the last write."""
        self._is_in_doubt = True

    def on_read(self, found: Footprint | None) -> bool:
        """Compare with what Redis holds of this process, None if inconsistent; returns False when entries were lost."""
        write = self._planned
        self._is_in_doubt = False
        if write is not None and found == write.after:
            self.written(write)
        elif found is None or found != self._known:
            self._known = self._planned = None
            return False
        self._planned = None
        return True

    def _entries(self, pending: deque[tuple[BlockHash, bool]]) -> tuple[Changes, ...]:
        first_sequence, changes = self._next - len(pending), tuple(islice(pending, _CHANGES_AT_ONCE))
        return tuple(
            Changes(first_sequence=first_sequence + start, changes=changes[start : start + MAX_CHANGES])
            for start in range(0, len(changes), MAX_CHANGES)
        )

    def _fresh_write(self, entries: tuple[Changes, ...], names: dict[BlockHash, None]) -> Write:
        after = Footprint(next_sequence=self._next, state_sequence=self._next, num_entries=len(entries))
        return Write(entries=entries, state=tuple(names), keep_from=None, is_fresh=True, after=after)

    def _append_write(self, there: Footprint, entries: tuple[Changes, ...], names: dict[BlockHash, None]) -> Write:
        end = entries[-1].next_sequence
        state: tuple[BlockHash, ...] | None = None
        state_sequence, keep_from = there.state_sequence, None
        # The state is the current mirror, so it can be written only when no changes remain pending.
        if end == self._next and end - state_sequence > max(self._min_log, len(names) // 2):
            state, keep_from, state_sequence = tuple(names), state_sequence, end
        num_kept = sum(keep_from is None or ends > keep_from for ends in self._log)
        after = Footprint(next_sequence=end, state_sequence=state_sequence, num_entries=num_kept + len(entries))
        return Write(entries=entries, state=state, keep_from=keep_from, is_fresh=False, after=after)

    def _give_up(self) -> None:
        self._known = self._planned = self._pending = None
