"""Counts the requests that wait or run, by the LoRA adapter that they name; those without one are not counted."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

_T = TypeVar("_T")


class AdapterUse:
    """The clients' requests of one router."""

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        """Requests that wait for their turn, by the adapter's name."""
        self.running: Counter[str] = Counter()
        """Requests that have had it and have not ended, likewise."""

    @asynccontextmanager
    async def counted(self, name: str, turn: AbstractAsyncContextManager[_T]) -> AsyncIterator[_T]:
        """Enter `turn`; the request counts as waiting until it has been entered, and then as running."""
        counts = self.waiting
        counts[name] += 1
        try:
            async with turn as visit:
                _one_less(counts, name)
                counts = self.running
                counts[name] += 1
                yield visit
        finally:
            _one_less(counts, name)


def _one_less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]  # names of adapters come and go
