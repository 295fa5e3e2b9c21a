"""All lives of one request, breadth first, as a graph whose nodes are numbered by the faults they need."""

from collections import deque
from dataclasses import dataclass, field

from tandem.errors import InvariantError, ServingError
from tests.explore.environment import Environment, Move
from tests.explore.life import Packed, unborn
from tests.explore.properties import Violation
from tests.explore.traces import Broken, words

STEP, BIND, FAULT, CRASH, DECODE_CRASH = range(5)
"""Kinds of edges: steps that need nobody, or the pool; faults of this life alone, or of whole processes."""
_FAULTS = {"crash": CRASH, "decode worker crashes": DECODE_CRASH}
_WRONG = (Violation, InvariantError, ServingError, LookupError, AttributeError, TypeError)
"""What a broken protocol raises: a property, or a machine that meets what it rules out."""


@dataclass(slots=True)
class Lives:
    """The graph. Node 0 is the request's start; `edges[i]` are (kind, target)."""

    environment: Environment
    nodes: list[Packed] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    """Fewest faults with which the node can be reached; ascending."""
    parents: list[tuple[int, Move] | None] = field(default_factory=list)
    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    num_moves: int = 0
    _numbers: dict[Packed, int] = field(default_factory=dict)

    def trace(self, node: int) -> list[str]:
        """The shortest way there with the fewest faults, in words."""
        lines: list[str] = []
        step = self.parents[node]
        while step is not None:
            node, move = step
            lines.append(words(self.environment, move))
            step = self.parents[node]
        return lines[::-1]

    def edge_in_words(self, node: int, target: int) -> str:
        """The move that leads from one life to the next."""
        life = self.nodes[node]
        for move in [*self.environment.progress(life), *self.environment.faults(life)]:
            if move[0] == "bind":
                move = ("bind", move[1], self._free_blocks(life, move[2]))
            if move[-1] is not None and self.environment.apply(life, move) == self.nodes[target]:
                return words(self.environment, move)
        raise LookupError(f"no move leads from {node} to {target}")

    def explore(self) -> "Lives":
        """Follow every move. Raises Broken, with the shortest trace, where a property does not hold."""
        start = self.environment.apply(unborn(), ("begin", 0))
        later: list[tuple[int, Move]] = []
        self._add(start, 0, None)
        next_node = 0
        for level in range(self.environment.scope.max_faults + 1):
            for node, move in later:
                self._follow(node, move, level, _FAULTS.get(move[0], FAULT))
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
            self.edges.append([])
        return number

    def _expand(self, node: int, level: int, later: list[tuple[int, Move]]) -> None:
        life = self.nodes[node]
        moves = self.environment.progress(life)
        if not moves and not life.ended:
            raise Broken(f"stuck: {life}", self.trace(node))
        for move in moves:
            if move[0] != "bind":
                self._follow(node, move, level, STEP)
            elif (blocks := self._free_blocks(life, move[2])) is not None:
                self._follow(node, ("bind", move[1], blocks), level, BIND)
        if level < self.environment.scope.max_faults:
            later += [(node, move) for move in self.environment.faults(life)]

    def _free_blocks(self, life: Packed, count: int) -> tuple[int, ...] | None:
        """The pool holds exactly one request's blocks, so that every block is reused as soon as it can be."""
        taken = {block for block, _owner in life.blocks}
        free = [block for block in range(self.environment.scope.num_chunks) if block not in taken]
        return tuple(free[:count]) if len(free) >= count else None

    def _follow(self, node: int, move: Move, level: int, kind: int) -> None:
        try:
            life = self.environment.apply(self.nodes[node], move)
        except _WRONG as error:
            last = words(self.environment, move)
            raise Broken(f"{type(error).__name__}: {error}", [*self.trace(node), last]) from error
        self.num_moves += 1
        target = self._add(life, level, (node, move))
        self.edges[node].append((kind, target))

    def _check_everything_ends(self) -> None:
        """From every life, however it came about, an end can be reached without further trouble."""
        back: list[list[int]] = [[] for _ in self.nodes]
        for node, edges in enumerate(self.edges):
            for kind, target in edges:
                if kind in (STEP, BIND):
                    back[target].append(node)
        ends = [node for node, life in enumerate(self.nodes) if life.ended]
        reached, queue = set(ends), deque(ends)
        while queue:
            for node in back[queue.popleft()]:
                if node not in reached:
                    reached.add(node)
                    queue.append(node)
        if len(reached) < len(self.nodes):
            lost = next(node for node in range(len(self.nodes)) if node not in reached)
            raise Broken("nothing leads to an end from here", self.trace(lost))
