"""All lives of one request, breadth first, as a graph whose nodes are numbered by the faults they need."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import InvariantError, ServingError
from tests.proofs.explore.edges import Edges, Numbers
from tests.proofs.explore.model.environment import Environment, Move
from tests.proofs.explore.model.life import Packed, unborn
from tests.proofs.explore.model.properties import Violation
from tests.proofs.explore.traces import Broken, words

STEP, FAULT = 0, 1
"""Kinds of edges: what happens by itself, and what is this request's own misfortune."""
EVENTS = (("crash", 0), ("crash", 1), ("hang", 0), ("hang", 1), ("cut", 0), ("cut", 1), ("decode worker crashes",))
"""Events that reach every request concerned: an edge of kind EVENT plus the index here."""
EVENT = 2
BIND = 16
"""Needs the pool: an edge of kind BIND plus the blocks that are bound."""
_KIND_OF = {event: EVENT + index for index, event in enumerate(EVENTS)}
_WRONG = (Violation, InvariantError, ServingError, LookupError, AttributeError, TypeError)
"""What a broken protocol raises: a property, or a machine that meets what it rules out."""


@dataclass(slots=True)
class Lives:
    """The graph. Node 0 is a request that nobody has started; edges are from `sources` to `targets`."""

    environment: Environment
    nodes: list[Packed] = field(default_factory=list)
    levels: "array[int]" = field(default_factory=lambda: array("q"))
    """Fewest faults with which the node can be reached; ascending."""
    parents: list[tuple[int, Move] | None] = field(default_factory=list)
    sources: "array[int]" = field(default_factory=lambda: array("q"))
    targets: "array[int]" = field(default_factory=lambda: array("q"))
    kinds: "array[int]" = field(default_factory=lambda: array("q"))
    _numbers: dict[Packed, int] = field(default_factory=dict)

    @property
    def num_moves(self) -> int:
        return len(self.sources)

    def trace(self, node: int) -> list[str]:
        """The shortest way there with the fewest faults, in words."""
        lines: list[str] = []
        step = self.parents[node]
        while step is not None:
            node, move = step
            lines.append(words(self.environment, move))
            step = self.parents[node]
        return lines[::-1]

    def edges(self, *, backward: bool = False, steps_only: bool = False) -> Edges:
        """The graph as arrays."""
        sources, targets, kinds = (np.array(a, dtype=np.int64) for a in (self.sources, self.targets, self.kinds))
        if steps_only:
            sources, targets, kinds = (a[kinds == STEP] for a in (sources, targets, kinds))
        if backward:
            sources, targets = targets, sources
        return Edges(sources, targets, kinds, len(self.nodes))

    def explore(self) -> "Lives":
        """Follow every move. Raises Broken, with the shortest trace, where a property does not hold."""
        later: list[tuple[int, Move]] = []
        self._add(unborn(), 0, None)
        next_node = 0
        for level in range(self.environment.scope.max_faults + 1):
            for node, move in later:
                self._follow(node, move, level, _KIND_OF.get(move, FAULT))
            later = []
            while next_node < len(self.nodes):
                self._expand(next_node, level, later)
                next_node += 1
        self._check_everything_ends()
        return self

    def _add(self, life: Packed, level: int, parent: tuple[int, Move] | None) -> int:
        number = self._numbers.setdefault(life, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(life)
            self.levels.append(level)
            self.parents.append(parent)
        return number

    def _expand(self, node: int, level: int, later: list[tuple[int, Move]]) -> None:
        life = self.nodes[node]
        for move in self.environment.progress(life):
            if move[0] != "bind":
                self._follow(node, move, level, STEP)
            elif (blocks := self._free_blocks(life, move[2])) is not None:
                self._follow(node, ("bind", move[1], blocks), level, BIND + len(blocks))
        if level < self.environment.scope.max_faults:
            later += [(node, move) for move in self.environment.faults(life)]

    def _free_blocks(self, life: Packed, count: int) -> tuple[int, ...] | None:
        taken = {block for block, _owner in life.blocks}
        free = [block for block in range(self.environment.scope.pool_blocks) if block not in taken]
        return tuple(free[:count]) if len(free) >= count else None

    def _follow(self, node: int, move: Move, level: int, kind: int) -> None:
        try:
            life = self.environment.apply(self.nodes[node], move)
        except _WRONG as error:
            last = words(self.environment, move)
            raise Broken(f"{type(error).__name__}: {error}", [*self.trace(node), last]) from error
        self.sources.append(node)
        self.targets.append(self._add(life, level, (node, move)))
        self.kinds.append(kind)

    def _check_everything_ends(self) -> None:
        """From every life, however it came about, an end can be reached without trouble and without the pool.

        So no other request can prevent it, whatever that one holds.
        """
        ends: Numbers = np.flatnonzero([life.ended for life in self.nodes])
        reached = self.edges(backward=True, steps_only=True).reached(ends)
        if not reached.all():
            raise Broken("nothing leads to an end from here", self.trace(int(np.argmin(reached))))
