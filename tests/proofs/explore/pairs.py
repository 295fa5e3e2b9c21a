"""Two requests at once: every pair of lives that shared workers allow, by breadth-first search over arrays.

No machine, message, grant or write of one hand-off ever reaches another (`explorer.foreign_messages_do_nothing` proves
it on every state met). So two lives touch each other through four things only: the pool of a decode worker that they
share, the death of a process, the end of a link, and the number of faults. The state of the whole cluster is thus a
pair of nodes of the graph of all lives, and its moves are those of either life, and the events that reach both. No
interleaving is left out: `whole.py` searches a small cluster in the plain way, and finds as many states.

What must hold of a pair and does not follow from its lives alone is that blocks change hands between them cleanly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.proofs.explore.edges import Numbers
from tests.proofs.explore.lives import BIND, EVENT, EVENTS, FAULT, STEP, Lives
from tests.proofs.explore.model.life import LANDED, Packed
from tests.proofs.explore.traces import Broken

_SLICE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the second request is placed, compared with the first: there are two of either kind of worker."""

    same_decode: bool
    same_prefill: bool

    def seen_by_second(self, event: tuple[str, ...]) -> tuple[str, ...]:
        """What the second calls that event: to each request, its first prefill worker is number 0."""
        return event if self.same_prefill or len(event) == 1 else (event[0], 1 - event[1])

    def strikes_both(self, event: tuple[str, ...]) -> bool:
        """Both prefill workers serve both requests; a link or a decode worker may be one's own."""
        return self.same_decode or event[0] in ("crash", "hang")


class Pairs:
    """See the module's docstring."""

    def __init__(self, lives: Lives, meeting: Meeting) -> None:
        scope = lives.environment.scope
        self._lives, self._meeting, self._faults = lives, meeting, scope.max_faults
        self._levels = np.array(lives.levels, dtype=np.int64)
        self._held = np.array([len(life.blocks) for life in lives.nodes], dtype=np.int64)
        self._pool = scope.pool_blocks
        # With no block to spare, the pool has one request's blocks: both lives call them by the same names.
        self._named_alike = meeting.same_decode and not scope.spare_blocks
        self._blocks = np.array([sum(1 << b for b, _ in life.blocks) for life in lives.nodes], dtype=np.int64)
        self._writes = np.array([_written(life) for life in lives.nodes], dtype=np.int64)
        self._edges = lives.edges()
        self._targets = [self._event_targets(EVENT + index) for index in range(len(EVENTS))]
        after = self._edges.reached(np.unique(np.concatenate([s[s >= 0] for s in self._targets])))
        # Pairs are numbered without gaps: rows are first lives, as wide as the faults that they leave to the second;
        # two lives that one event may have reached together share its cost.
        upto = np.searchsorted(self._levels, np.arange(self._faults + 1), side="right")
        widths = np.where(after, upto[self._faults], upto[self._faults - self._levels])
        self._row = np.concatenate(([0], np.cumsum(widths)))
        self._seen = np.zeros(int(self._row[-1]) // 8 + 1, dtype=np.uint8)

    def _event_targets(self, kind: int) -> Numbers:
        """What each life becomes by that event; -1 where it is not concerned."""
        targets = np.full(len(self._levels), -1, dtype=np.int64)
        which, edge = self._edges.of(np.arange(len(self._levels)))
        chosen = self._edges.kinds[edge] == kind
        targets[which[chosen]] = self._edges.targets[edge[chosen]]
        return targets

    def explore(self) -> int:
        """Number of distinct pairs. Raises Broken, with a trace of each life, where a property does not hold."""
        total = 0
        found = [np.zeros(1, dtype=np.int64)]
        for level in range(self._faults + 1):
            pending = [new for pairs in found if len(new := self._new(pairs))]
            found = []
            while pending:
                pairs = pending.pop()
                if len(pairs) > _SLICE:
                    pending.append(pairs[_SLICE:])
                pairs = pairs[:_SLICE]
                total += len(pairs)
                first, second = self._split(pairs)
                self._check(first, second)
                if len(following := self._new(self._unseen(self._steps(first, second)))):
                    pending.append(following)
                if level < self._faults:
                    found.append(self._unseen(self._misfortunes(first, second)))
        return total

    def _new(self, pairs: Numbers) -> Numbers:
        """Those that were not seen before; now they are."""
        pairs = pairs[self._is_unseen(pairs)]
        if len(pairs):
            places = pairs >> 3
            starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
            bits = np.left_shift(np.uint8(1), (pairs & 7).astype(np.uint8))
            self._seen[places[starts]] |= np.bitwise_or.reduceat(bits, starts)
        return pairs

    def _unseen(self, moves: Iterator[tuple[Numbers, Numbers]]) -> Numbers:
        """The pairs to which these moves lead, in order and each once, less those seen before."""
        pairs = np.concatenate([self._row[first] + second for first, second in moves])
        pairs = np.sort(pairs[self._is_unseen(pairs)])
        return pairs[np.concatenate(([True], pairs[1:] != pairs[:-1]))] if len(pairs) else pairs

    def _is_unseen(self, pairs: Numbers) -> NDArray[np.bool_]:
        return (self._seen[pairs >> 3] >> (pairs & 7).astype(np.uint8)) & 1 == 0

    def _split(self, pairs: Numbers) -> tuple[Numbers, Numbers]:
        first = np.searchsorted(self._row, pairs, side="right") - 1
        return first, pairs - self._row[first]

    def _check(self, first: Numbers, second: Numbers) -> None:
        if not self._meeting.same_decode:
            return
        self._require(self._held[first] + self._held[second] <= self._pool, "the pool is overdrawn", first, second)
        if self._named_alike:
            shared = self._blocks[first] & self._blocks[second]
            self._require(shared == 0, "a block has two owners", first, second)
            crossing = (self._writes[first] & self._blocks[second]) | (self._writes[second] & self._blocks[first])
            self._require(crossing == 0, "a block is reused while a writer may be alive", first, second)

    def _require(self, holds: NDArray[np.bool_], what: str, first: Numbers, second: Numbers) -> None:
        if not holds.all():
            at = int(np.argmin(holds))
            traces = [("first", self._lives.trace(int(first[at]))), ("second", self._lives.trace(int(second[at])))]
            raise Broken(what, [f"{name} request: {line}" for name, lines in traces for line in lines])

    # Moves

    def _steps(self, first: Numbers, second: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """What happens by itself, to one of them."""
        for mover, other, swapped in ((first, second, False), (second, first, True)):
            which, edge = self._edges.of(mover)
            kinds, still = self._edges.kinds[edge], other[which]
            allowed = (kinds == STEP) | (kinds >= BIND)
            if self._meeting.same_decode:
                needed = np.where(kinds >= BIND, kinds - BIND, 0)
                allowed &= (needed == 0) | (self._held[mover][which] + self._held[still] + needed <= self._pool)
            moved, still = self._edges.targets[edge][allowed], still[allowed]
            yield (still, moved) if swapped else (moved, still)

    def _misfortunes(self, first: Numbers, second: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """What costs a fault: of one of them, or whatever both share."""
        for mover, other, swapped in ((first, second, False), (second, first, True)):
            which, edge = self._edges.of(mover)
            chosen = self._edges.kinds[edge] == FAULT
            moved, still = self._edges.targets[edge][chosen], other[which[chosen]]
            yield (still, moved) if swapped else (moved, still)
        for index, event in enumerate(EVENTS):
            theirs = EVENTS.index(self._meeting.seen_by_second(event))
            if self._meeting.strikes_both(event):
                yield self._after_event(event, (first, index), (second, theirs))
            else:
                yield self._after_event(event, (first, index), (second, None))
                yield self._after_event(event, (first, None), (second, theirs))

    def _after_event(
        self, event: tuple[str, ...], first: tuple[Numbers, int | None], second: tuple[Numbers, int | None]
    ) -> tuple[Numbers, Numbers]:
        hit = np.zeros(len(first[0]), dtype=bool)
        become = []
        for lives, index in (first, second):
            target = np.full(len(lives), -1) if index is None else self._targets[index][lives]
            hit |= target >= 0
            if event[0] == "hang" and index is not None:
                # A life with nothing under way from the hanging process sees it die.
                target = np.where(target >= 0, target, self._targets[index - 2][lives])
            become.append(np.where(target >= 0, target, lives))
        return become[0][hit], become[1][hit]


def _written(life: Packed) -> int:
    """Blocks into which something may still land, as bits."""
    return sum(1 << b for b in {b for w in life.writes if w.phase != LANDED for b, _position in w.slots})
