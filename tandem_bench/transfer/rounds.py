"""Rounds: every contestant moves the same case, one after another, and then the next case.

A machine's speed drifts by a factor of two within seconds, so rates are only compared within one round; the order
rotates by one each round, so that no contestant always follows the same one. A turn is the best of a few transfers,
since other activity only adds time.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tandem_bench.errors import CannotMeasure
from tandem_bench.transfer.cases import Case
from tandem_bench.transfer.contestants import Contestant
from tandem_bench.transfer.pair import Pair
from tandem_bench.transfer.pools import Pools

REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Turn of one contestant in one case of one round."""

    contestant: str
    case: str
    round_index: int
    num_bytes: int
    seconds: float
    """Duration of the best of REPEATS transfers."""
    sender_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0
    """CPU times as means over the turn's transfers, including polling."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Peer that could not be measured."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What to run, how often, and how to report progress."""

    cases: Sequence[Case]
    num_rounds: int
    limit_s: float | None
    """Time after which no further round is started if it would probably end later; the first always is."""
    note: Callable[[str], None]


class Field:
    """Running contestants, each frozen except in its turns; the stack stops them."""

    def __init__(self, pools: Pools, stack: AsyncExitStack, note: Callable[[str], None]) -> None:
        self._pools, self._stack, self._note = pools, stack, note
        self.pairs: list[Pair] = []
        self.absent: list[Absence] = []

    async def admit(self, contestant: Contestant, cases: Sequence[Case], *, may_fail: bool) -> None:
        """Start a contestant and check every byte of each case once. On failure it is absent if it `may_fail`."""
        pair = Pair(contestant, self._pools)
        try:
            self._stack.push_async_callback(pair.stop)
            about = await pair.start()
            for case in cases:
                await pair.prepare(case)
                self._pools.wipe()
                await pair.run(case)
                wanted = [(0, 0, case.num_bytes)] if contestant.is_whole else case.copies()
                self._pools.check(f"{contestant.name} {case.name}", wanted)
        except CannotMeasure as error:
            if not may_fail:
                raise
            self.miss(contestant.name, error)
            await pair.stop()
        else:
            pair.freeze()
            self.pairs.append(pair)
            details = "".join(f", {key} {value}" for key, value in about.items())
            self._note(f"{contestant.name}: every byte of {len(cases)} cases arrived{details}")

    def miss(self, name: str, error: CannotMeasure) -> None:
        """Record a peer as absent."""
        reason = str(error).splitlines()
        self.absent.append(Absence(name=name, reason=reason[0]))
        self._note(f"{name}: absent: {error}")

    async def run(self, contest: Contest) -> list[Turn]:
        """Return every turn, in order. Raises CannotMeasure."""
        done: list[Turn] = []
        started_s = time.monotonic()
        for round_index in range(contest.num_rounds):
            spent_s = time.monotonic() - started_s
            if round_index and contest.limit_s is not None and spent_s * (1 + 1 / round_index) > contest.limit_s:
                contest.note(f"{round_index} rounds took {spent_s:.0f} s: stopping; use --rounds N to run all of N")
                break
            turn = round_index % len(self.pairs)
            for case in contest.cases:
                for pair in (*self.pairs[turn:], *self.pairs[:turn]):
                    done.append(await _turn(pair, case, round_index))
            contest.note(f"round {round_index + 1}: {describe(done, round_index)}")
        return done


async def _turn(pair: Pair, case: Case, round_index: int) -> Turn:
    pair.thaw()
    try:
        before = pair.cpu_s()
        seconds = min([await pair.run(case) for _ in range(REPEATS)])
        sender_s, receiver_s = (b - a for a, b in zip(before, pair.cpu_s(), strict=True))
    finally:
        pair.freeze()
    return Turn(
        contestant=pair.name,
        case=case.name,
        round_index=round_index,
        num_bytes=case.num_bytes,
        seconds=seconds,
        sender_cpu_s=sender_s / REPEATS,
        receiver_cpu_s=receiver_s / REPEATS,
    )


def describe(done: Sequence[Turn], round_index: int) -> str:
    """Describe a round in one line: every contestant's slowest and fastest case."""
    rates: dict[str, list[float]] = {}
    for turn in done:
        if turn.round_index == round_index:
            rates.setdefault(turn.contestant, []).append(turn.bytes_per_s / 1e9)
    return ", ".join(f"{name} {min(seen):.2f}-{max(seen):.2f}" for name, seen in rates.items()) + " GB/s"
