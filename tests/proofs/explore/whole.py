"""The whole cluster searched in the plain way: no graph of lives, no arrays, one dictionary of states.

Slow, and only there to check `pairs.py`: both must find equally many states.
"""

from collections.abc import Iterator
from functools import cache

from tests.proofs.explore.model.environment import Environment, Move
from tests.proofs.explore.model.life import Packed, unborn
from tests.proofs.explore.pairs import Meeting

State = tuple[Packed, Packed]


class Whole:
    """Two requests, each with its decode worker (perhaps the same one), and two prefill workers."""

    def __init__(self, environment: Environment, meeting: Meeting) -> None:
        self._environment = environment
        self._meeting = meeting
        # The same life is met beside many others.
        self._progress, self._faults = cache(environment.progress), cache(environment.faults)
        self._apply = cache(environment.apply)

    def explore(self) -> int:
        """Number of distinct states."""
        fewest: dict[State, int] = {}
        found: set[State] = {(unborn(), unborn())}
        for faults in range(self._environment.scope.max_faults + 1):
            queue = [state for state in found if state not in fewest]
            found = set()
            while queue:
                state = queue.pop()
                if state in fewest:
                    continue
                fewest[state] = faults
                queue += [after for after in self._steps(state) if after not in fewest]
                found.update(self._misfortunes(state))
        return len(fewest)

    def _steps(self, state: State) -> Iterator[State]:
        for who in (0, 1):
            for move in self._progress(state[who]):
                if move[0] != "bind":
                    yield self._after(state, who, move)
                elif (blocks := self._free(state, who, move[2])) is not None:
                    yield self._after(state, who, ("bind", move[1], blocks))

    def _free(self, state: State, who: int, count: int) -> tuple[int, ...] | None:
        pool = set(range(self._environment.scope.pool_blocks))
        mine = [block for block, _owner in state[who].blocks]
        others = len(state[1 - who].blocks) if self._meeting.same_decode else 0
        if len(pool) - len(mine) - others < count:
            return None
        return tuple(sorted(pool.difference(mine))[:count])

    def _after(self, state: State, who: int, move: Move) -> State:
        moved = self._apply(state[who], move)
        return (moved, state[1]) if who == 0 else (state[0], moved)

    def _misfortunes(self, state: State) -> Iterator[State]:
        possible = [self._faults(life) for life in state]
        for who in (0, 1):
            for move in possible[who]:
                theirs = self._meeting.seen_by_second(move) if self._is_event(move) else None
                if theirs is None or not self._meeting.strikes_both(move):
                    yield self._after(state, who, move)
                    continue
                struck = list(state)
                struck[who] = self._apply(state[who], move)
                for reaction in (theirs, ("crash", *theirs[1:])):
                    if reaction in possible[1 - who] and (reaction == theirs or move[0] == "hang"):
                        struck[1 - who] = self._apply(state[1 - who], reaction)
                        break
                yield (struck[0], struck[1])

    @staticmethod
    def _is_event(move: Move) -> bool:
        return move[0] in ("crash", "hang", "cut", "decode worker crashes")
