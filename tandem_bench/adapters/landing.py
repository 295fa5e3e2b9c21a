"""Where requests for adapters landed, and how often these were loaded. Pure.

What each worker holds is followed from the router's decisions in their order: its last `resident` adapters, which is
what a worker of that much memory keeps. Loads are the workers' own counts, against those of one least-recently-used
cache with the room of all workers of a pool, which no cluster has.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from tandem_bench.report import Row, figure

MIN_LANDED_PERCENT = 95.0
MAX_LOADS_RATIO = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """How the requests of one pool landed."""

    num_resident: int
    """Requests whose adapter some worker held."""
    num_landed: int
    """Those that were sent to such a worker."""


class LeastRecentlyUsed:
    """The last `room` names that were used."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def use(self, name: str) -> bool:
        """Use a name; returns whether it was there."""
        was_there = name in self._names
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._room:
            self._names.popitem(last=False)
        return was_there


def zipf_draws(names: Sequence[str], count: int, rng: Random) -> list[str]:
    """Draw names so that the n-th is as likely as 1 / n."""
    return rng.choices(names, weights=[1 / (place + 1) for place in range(len(names))], k=count)


def landing(placed: Iterable[tuple[str, str]], resident: int) -> Landing:
    """Follow requests, each an adapter and the worker that it was sent to, in order."""
    holders: dict[str, LeastRecentlyUsed] = {}
    num_resident = num_landed = 0
    for name, worker in placed:
        is_anywhere = any(name in holder for holder in holders.values())
        has_landed = holders.setdefault(worker, LeastRecentlyUsed(resident)).use(name)
        num_resident += is_anywhere
        num_landed += has_landed
    return Landing(num_resident=num_resident, num_landed=num_landed)


def num_misses(names: Iterable[str], room: int) -> int:
    """Number of loads of one cache."""
    cache = LeastRecentlyUsed(room)
    return sum(not cache.use(name) for name in names)


def landing_rows(
    pool: str, placed: Sequence[tuple[str, str]], *, num_loads: int, resident: int, num_workers: int
) -> list[Row]:
    """Figures of one pool; `placed`: as in `landing`."""
    found = landing(placed, resident)
    share = 100 * found.num_landed / max(1, found.num_resident)
    least = num_misses((name for name, _ in placed), resident * num_workers)
    return [
        figure(
            f"{pool}: share of requests that landed where their adapter was", share, "%", at_least=MIN_LANDED_PERCENT
        ),
        figure(f"{pool}: loads", num_loads, ""),
        figure(f"{pool}: loads of one cache with all slots", least, ""),
        figure(f"{pool}: ratio of loads", num_loads / least, "", at_most=MAX_LOADS_RATIO),
    ]
