"""Two requests at once: every pair of lives that shared workers allow, by breadth-first search over arrays.

Two lives touch each other through three things only: the pool of a shared decode worker, the crash of a shared process,
and the number of faults. A pair of lives is thus two nodes of the graph of all lives, and its moves are those of either
life that the other allows. No interleaving is left out; the search is exact and costs some nanoseconds a pair.

A crash that strikes both requests counts as a fault of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.explore.lives import BIND, CRASH, DECODE_CRASH, STEP, Lives
from tests.explore.traces import Broken

Numbers = NDArray[np.int64]
_SLICE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What the two requests have in common."""

    decode_worker: bool
    prefill_worker: bool

    def together(self, kind: int) -> bool:
        """Whether an edge of this kind strikes both."""
        return (kind == CRASH and self.prefill_worker) or (kind == DECODE_CRASH and self.decode_worker)


class Pairs:
    """See the module's docstring."""

    def __init__(self, lives: Lives, sharing: Sharing) -> None:
        self._lives = lives
        self._sharing = sharing
        self._faults = lives.environment.scope.max_faults
        self._levels = np.array(lives.levels, dtype=np.int64)
        self._blocks = np.array([sum(1 << b for b, _ in life.blocks) for life in lives.nodes], dtype=np.int64)
        self._ended = np.array([life.ended for life in lives.nodes])
        counts = np.array([len(edges) for edges in lives.edges], dtype=np.int64)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        flat = np.array([edge for edges in lives.edges for edge in edges], dtype=np.int64).reshape(-1, 2)
        self._kinds, self._targets = flat[:, 0], flat[:, 1]
        self._free, self._binds = self._having(STEP), self._having(BIND)
        self._struck = {kind: self._strike(kind) for kind in (CRASH, DECODE_CRASH) if sharing.together(kind)}
        # Pairs are numbered without gaps: rows are first lives, as wide as the faults they leave to the second.
        upto = np.searchsorted(self._levels, np.arange(self._faults + 1), side="right")
        widths = upto[self._faults - self._levels]
        self._row = np.concatenate(([0], np.cumsum(widths)))
        self.distance = np.zeros(int(self._row[-1]), dtype=np.uint8)
        """Moves from the start to each pair, plus one; 0 where none leads there."""

    def _having(self, kind: int) -> NDArray[np.bool_]:
        having = np.zeros(len(self._levels), dtype=bool)
        having[np.repeat(np.arange(len(self._levels)), np.diff(self._first))[self._kinds == kind]] = True
        return having

    def _strike(self, kind: int) -> Numbers:
        """What each life becomes by a crash of that kind; -1 where it is not concerned."""
        struck = np.full(len(self._levels), -1, dtype=np.int64)
        sources = np.repeat(np.arange(len(self._levels)), np.diff(self._first))
        chosen = self._kinds == kind
        struck[sources[chosen]] = self._targets[chosen]
        return struck

    def explore(self) -> int:
        """Number of distinct pairs. Raises Broken, with the shortest trace, where a property does not hold."""
        frontier = np.zeros(1, dtype=np.int64)
        self.distance[0] = depth = 1
        total = 1
        while len(frontier):
            depth += 1
            if depth > 255:
                raise Broken("no end in sight", [])
            fresh = []
            for start in range(0, len(frontier), _SLICE):
                first, second = self._split(frontier[start : start + _SLICE])
                self._check(first, second)
                moved = [self._number(a, b) for a, b in self._moves(first, second)]
                found = np.concatenate(moved)
                found = np.unique(found[self.distance[found] == 0])
                self.distance[found] = depth
                fresh.append(found)
            frontier = np.concatenate(fresh)
            total += len(frontier)
        return total

    def _split(self, pairs: Numbers) -> tuple[Numbers, Numbers]:
        first = np.searchsorted(self._row, pairs, side="right") - 1
        return first, pairs - self._row[first]

    def _number(self, first: Numbers, second: Numbers) -> Numbers:
        return self._row[first] + second

    def _check(self, first: Numbers, second: Numbers) -> None:
        if self._sharing.decode_worker:
            both = (self._blocks[first] & self._blocks[second]) != 0
            if both.any():
                raise Broken("a block has two owners", self.trace(int(first[both][0]), int(second[both][0])))
        stuck = ~self._can_go(first, second) & ~self._can_go(second, first)
        stuck &= ~(self._ended[first] & self._ended[second])
        if stuck.any():
            raise Broken("both requests are stuck", self.trace(int(first[stuck][0]), int(second[stuck][0])))

    def _can_go(self, mover: Numbers, other: Numbers) -> NDArray[np.bool_]:
        """Whether the mover has a move that is nobody's fault."""
        if not self._sharing.decode_worker:
            return self._free[mover] | self._binds[mover]
        return self._free[mover] | (self._binds[mover] & (self._blocks[other] == 0))

    def _moves(self, first: Numbers, second: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        yield self._moves_of(first, second)
        moved, still = self._moves_of(second, first)
        yield still, moved
        for struck in self._struck.values():
            a, b = struck[first], struck[second]
            chosen = (a >= 0) & (b >= 0)
            yield self._affordable(a[chosen], b[chosen])

    def _moves_of(self, mover: Numbers, other: Numbers) -> tuple[Numbers, Numbers]:
        counts = self._first[mover + 1] - self._first[mover]
        which = np.repeat(np.arange(len(mover)), counts)
        edge = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + self._first[mover][which]
        target, still, kind = self._targets[edge], other[which], self._kinds[edge]
        allowed = np.ones(len(which), dtype=bool)
        if self._sharing.decode_worker:
            allowed &= (kind != BIND) | (self._blocks[still] == 0)
        for together, struck in self._struck.items():
            allowed &= (kind != together) | (struck[still] < 0)
        return self._affordable(target[allowed], still[allowed])

    def _affordable(self, first: Numbers, second: Numbers) -> tuple[Numbers, Numbers]:
        chosen = self._levels[first] + self._levels[second] <= self._faults
        return first[chosen], second[chosen]

    # Traces

    def trace(self, first: int, second: int) -> list[str]:
        """The shortest way to a pair, in words."""
        lines: list[str] = []
        distance = int(self.distance[self._row[first] + second])
        while distance > 1:
            distance -= 1
            before = self._before(first, second, distance)
            lines.append(self._said(before, (first, second)))
            first, second = before
        return lines[::-1]

    def _before(self, first: int, second: int, distance: int) -> tuple[int, int]:
        """A pair one move closer to the start."""
        sources = np.repeat(np.arange(len(self._levels)), np.diff(self._first))
        into = [sources[self._targets == target] for target in (first, second)]
        pairs = [(int(a), second) for a in into[0]] + [(first, int(b)) for b in into[1]]
        pairs += [
            (int(a), int(b))
            for struck in self._struck.values()
            for a in into[0]
            for b in into[1]
            if (struck[a], struck[b]) == (first, second)
        ]
        for a, b in pairs:
            if self._levels[a] + self._levels[b] <= self._faults and self.distance[self._row[a] + b] == distance:
                moves = self._moves(np.array([a]), np.array([b]))
                if any((first, second) == (x, y) for xs, ys in moves for x, y in zip(xs, ys, strict=True)):
                    return a, b
        raise LookupError("no way leads here")

    def _said(self, before: tuple[int, int], after: tuple[int, int]) -> str:
        said = [
            f"{name}: {self._lives.edge_in_words(a, b)}"
            for name, a, b in zip(("first request", "second request"), before, after, strict=True)
            if a != b
        ]
        return "; ".join(said)
