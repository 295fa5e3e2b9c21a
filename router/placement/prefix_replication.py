"""Decides which prefixes are in such demand that another worker should have a copy, before a queue builds up. Pure.

Affinity alone sends every request that shares a prefix to the worker that has it, until waiting there costs more than
computing the whole prefix again. For a long prefix that is a long wait, at which the queue settles. So the work that a
prefix brings to its holder is measured, in tokens a second with exponential decay: when it would keep each copy's
holder busy for more than `most_share` of its time, one more worker may have a copy. `Demand.replicate_tokens` then
waives the price of the copy until a worker is chosen that lacks it; the copy is computed, or fetched from a holder,
with that request. A copy is given up when the others would stay below `least_share` without it: nothing is deleted, but
making it again is charged in full, and its worker's LRU evicts it.

Prompts share beginnings of any length, so demand is counted for beginnings of 16, 32, 64, ... hash blocks. Copies cost
tokens; all of them together may take `budget_share` of the tokens that are computed.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import exp, log

from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash

_OFTEN = 2
"""Requests before a prefix counts as shared."""
_COLD_HALF_LIVES = 20
"""Half-lives without a request after which a prefix is forgotten: a millionth of its demand is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationPolicy:
    most_share: float = 0.5
    """Share of a holder's time above which another copy is wanted."""
    least_share: float = 0.2
    """Share of a holder's time with one copy less, below which that copy is no longer wanted."""
    half_life_s: float = 20.0
    """Time in which past demand loses half its weight."""
    settle_s: float = 2.0
    """Time between two copies of one prefix: the first must take effect before the next is considered."""
    budget_share: float = 0.1
    """Share of the computed tokens that copies may cost."""
    burst_tokens: int = 65_536
    """Budget saved up at most, and available at the start."""
    most_prefixes: int = 4096
    """Prefixes followed at a time; the least recently requested is forgotten, and those long without a request are."""
    least_blocks: int = 16
    """Hash blocks of the shortest prefix that is followed."""


class _Heat:
    __slots__ = ("at_s", "num_blocks", "num_copies", "num_requests", "rate", "settles_s")

    def __init__(self, now_s: float, num_blocks: int) -> None:
        self.at_s = now_s
        self.num_blocks = num_blocks
        self.num_requests = 0
        self.rate = 0.0
        """Milliseconds of a holder's time per second."""
        self.num_copies = 1
        """Number of copies wanted."""
        self.settles_s = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """One prefix in high demand, for status reports."""

    name: BlockHash
    """Name of its last block."""
    num_tokens: int
    num_requests: int
    busy_share: float
    """Share of one holder's time that the work on it would take."""
    num_copies: int
    """Number of copies wanted."""


class HotPrefixes:
    """Counts demand for prefixes, decides which to copy, and keeps the budget."""

    def __init__(self, policy: ReplicationPolicy) -> None:
        self._policy = policy
        self._heats: OrderedDict[BlockHash, _Heat] = OrderedDict()
        self._budget = float(policy.burst_tokens)
        self._decay = log(2.0) / policy.half_life_s

    def __len__(self) -> int:
        return len(self._heats)

    def wanted_tokens(self, names: Sequence[BlockHash], num_holders: Callable[[int], int], now_s: float) -> int:
        """Return the leading tokens of which one more worker should have a copy; 0 when none is wanted or affordable.

        `num_holders`: returns how many workers hold a number of leading tokens; called only for prefixes in high
        demand.
        """
        least, most_share = self._policy.least_blocks, self._policy.most_share
        for doublings in reversed(range((len(names) // least).bit_length())):
            depth = least << doublings
            heat = self._heats.get(names[depth - 1])
            if heat is None or now_s < heat.settles_s:
                continue
            # Demand only decays until it is next counted: nearly always it was too low for a second copy even then.
            if heat.num_copies == 1 and heat.rate / 1e3 <= most_share:
                continue
            copies, tokens = self._copies(heat, now_s), depth * HASH_BLOCK_TOKENS
            if copies > 1 and tokens <= self._budget and 0 < num_holders(tokens) < copies:
                return tokens
        return 0

    def depths(self, num_blocks: int) -> list[int]:
        """Return the lengths of the prompt's prefixes that are followed: powers of two."""
        least = self._policy.least_blocks
        return [least << doublings for doublings in range((num_blocks // least).bit_length())]

    def on_placed(self, names: Sequence[BlockHash], *, work_ms: float, tokens: int, now_s: float) -> None:
        """Count a placed request for a prompt of these blocks: computing `tokens` takes its worker `work_ms`."""
        policy, depth = self._policy, self._policy.least_blocks
        self._budget = min(policy.burst_tokens, self._budget + tokens * policy.budget_share)
        while depth <= len(names):
            name = names[depth - 1]
            heat = self._heats.get(name)
            if heat is None:
                self._forget(now_s)
                heat = self._heats[name] = _Heat(now_s, depth)
            else:
                self._heats.move_to_end(name)
            heat.num_requests += 1
            # In the long run, work that arrives at a steady rate sums up to just that rate.
            heat.rate = heat.rate * exp((heat.at_s - now_s) * self._decay) + work_ms * self._decay
            heat.at_s = now_s
            depth *= 2

    def _forget(self, now_s: float) -> None:
        """Make room for a prefix: forget the least recently requested if there are too many, and those gone cold."""
        cold_s = now_s - _COLD_HALF_LIVES * self._policy.half_life_s
        while self._heats:
            name, heat = next(iter(self._heats.items()))
            if len(self._heats) < self._policy.most_prefixes and heat.at_s > cold_s:
                return
            del self._heats[name]

    def copied(self, names: Sequence[BlockHash], num_tokens: int, held_tokens: int, now_s: float) -> None:
        """Charge the budget for a placement that makes a copy: of `num_tokens`, all but `held_tokens` are computed."""
        self._budget -= num_tokens - held_tokens
        for depth in self.depths(min(len(names), num_tokens // HASH_BLOCK_TOKENS)):
            if (heat := self._heats.get(names[depth - 1])) is not None:
                heat.settles_s = now_s + self._policy.settle_s

    def hottest(self, most: int, now_s: float) -> list[HotPrefix]:
        """Return prefixes requested more than once, in order of demand; of nested ones with equal demand, the
        longest."""
        longest: dict[tuple[float, float], tuple[BlockHash, _Heat]] = {}
        for name, heat in self._heats.items():
            alike = (heat.rate, heat.at_s)
            if heat.num_requests < _OFTEN:
                continue
            if alike not in longest or longest[alike][1].num_blocks < heat.num_blocks:
                longest[alike] = (name, heat)
        found = nlargest(most, longest.values(), key=lambda each: self._rate(each[1], now_s))
        return [
            HotPrefix(
                name=name,
                num_tokens=heat.num_blocks * HASH_BLOCK_TOKENS,
                num_requests=heat.num_requests,
                busy_share=self._rate(heat, now_s) / 1e3,
                num_copies=heat.num_copies,
            )
            for name, heat in found
        ]

    def _rate(self, heat: _Heat, now_s: float) -> float:
        return heat.rate * exp(-(now_s - heat.at_s) * self._decay)

    def _copies(self, heat: _Heat, now_s: float) -> int:
        """Return the copies wanted: the present number, unless that is too few, or more than enough."""
        rate = self._rate(heat, now_s) / 1e3
        while rate > self._policy.most_share * heat.num_copies:
            heat.num_copies += 1
        while heat.num_copies > 1 and rate < self._policy.least_share * (heat.num_copies - 1):
            heat.num_copies -= 1
        return heat.num_copies
