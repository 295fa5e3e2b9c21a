"""How much is kept from one request to the next: objects, the entries of every container that the router owns, and what
only a collection of cycles finds."""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OWNED = ("router.", "tandem.", "prometheus_client", "tests.")
_CONTAINERS = (dict, list, set, frozenset, deque, tuple)


def entries(roots: dict[str, Any]) -> Counter[str]:
    """Entries of containers by the shortest way to them; equal ones within another container count together.

    Logs of a fixed length are left out: they are filled and grow no more.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left = deque(roots.items())
    while left:
        way, one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            if getattr(one, "maxlen", None) is None:
                found[way] += len(one)
            left += [(f"{way}[]", each) for each in (*one, *(one.values() if isinstance(one, dict) else ()))]
        else:
            left += [(f"{way}.{name}", each) for name, each in _fields(one)]
    return found


def _fields(one: Any) -> Iterator[tuple[str, Any]]:
    if (owner := getattr(one, "__self__", None)) is not None:
        yield "self", owner
    if isinstance(one, type) or not type(one).__module__.startswith(_OWNED):
        return
    yield from vars(one).items() if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)


class Meter:
    """Samples of what is kept, taken while nothing is under way."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._roots = roots
        self.samples: list[tuple[int, int]] = []
        """Requests so far, and blocks of memory that Python's allocator has given out."""
        self._first: Counter[str] = Counter()
        self._last: Counter[str] = Counter()

    def sample(self, num_requests: int) -> None:
        self._last = entries(self._roots)
        self._first = self._first or self._last
        gc.collect()
        self.samples.append((num_requests, sys.getallocatedblocks()))

    def objects_per_request(self) -> float:
        """The slope of the line through all samples."""
        count, xs = len(self.samples), [x for x, _ in self.samples]
        mean_x, mean_y = (sum(column) / count for column in zip(*self.samples, strict=True))
        return sum((x - mean_x) * (y - mean_y) for x, y in self.samples) / sum((x - mean_x) ** 2 for x in xs)

    def grown(self, least: int) -> dict[str, tuple[int, int]]:
        """Containers with at least so many entries more in the last sample than in the first."""
        return {way: (self._first[way], now) for way, now in self._last.items() if now - self._first[way] >= least}


@contextmanager
def collecting() -> Iterator[Counter[str]]:
    """Types of the objects that were left in cycles, or held by them; filled at the end."""
    found: Counter[str] = Counter()
    # What was made before is not looked through, now or later: it is most of what there is (see tests/conftest.py).
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
