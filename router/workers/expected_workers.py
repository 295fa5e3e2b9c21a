"""Decode workers that are not here and may be expected to come: for them new requests wait, else they are refused.

A request that nobody can take waits if that is likely to end soon: the last decode worker is about to leave, or has
left, because it was told to, which is how one is replaced; or the directory names the address of one that was here, or
that was named, a moment ago, so that the router is trying to reach it. Otherwise it is better refused at once, so that
its client can go elsewhere: nobody is known to come, or has been expected for long. Pure.
"""

import math
from collections.abc import Callable, Collection

from router.types.worker_view import WorkerKey


class ExpectedWorkers:
    """One router's. Only decode workers are told of here: without one nothing is answered."""

    def __init__(self, *, within_s: float, clock: Callable[[], float]) -> None:
        """`within_s`: for how long after its end, or its first mention, one is expected; see `router.rejoin_s`."""
        self._within_s = within_s
        self._clock = clock
        self._who: dict[str, WorkerKey] = {}
        """Who was found at each address that is named."""
        self._missing_since_s: dict[str, float] = {}
        """Of addresses that are named and with whose worker there is no session."""
        self._here: set[WorkerKey] = set()
        self._relieved_s = -math.inf
        """When one left last that had been told to."""

    def named(self, addresses: Collection[str]) -> None:
        """The directory's, as they are now."""
        now_s = self._clock()
        self._who = {address: key for address, key in self._who.items() if address in addresses}
        absent = [address for address in addresses if self._who.get(address) not in self._here]
        self._missing_since_s = {address: self._missing_since_s.get(address, now_s) for address in absent}

    def found(self, address: str, key: WorkerKey) -> None:
        """A worker says who it is; it may still be turned away."""
        if address in self._missing_since_s:
            self._who[address] = key

    def joined(self, key: WorkerKey) -> None:
        self._here.add(key)
        for address in self._addresses_of(key):
            self._missing_since_s.pop(address, None)

    def left(self, key: WorkerKey, *, in_order: bool) -> None:
        """Its session has ended; `in_order`: it had been told to."""
        now_s = self._clock()
        self._here.discard(key)
        for address in self._addresses_of(key):
            self._missing_since_s[address] = now_s
        if in_order:
            self._relieved_s = now_s

    def due_s(self, *, num_serving: int, num_leaving: int) -> float:
        """For how long it is worth waiting, 0 for not at all, beside so many that take requests and that drain."""
        since_s = max(self._missing_since_s.values(), default=-math.inf)
        if not num_serving:
            if num_leaving:
                return math.inf
            since_s = max(since_s, self._relieved_s)
        return max(0.0, since_s + self._within_s - self._clock())

    def _addresses_of(self, key: WorkerKey) -> list[str]:
        return [address for address, found in self._who.items() if found == key]
