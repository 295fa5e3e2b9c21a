"""Decode workers that are absent but expected to join: new requests wait for them instead of being refused.

A request that no worker can take waits if that is likely to end soon: the last decode worker is about to leave, or has
left after a drain, which is how one is replaced; or the directory names the address of one that was connected, or first
named, a moment ago, so that the router is trying to reach it. Otherwise it is better refused at once, so that its
client can go elsewhere: no worker is expected, or one has been expected for too long. Pure.
"""

import math
from collections.abc import Callable, Collection

from router.types.worker_view import WorkerKey


class ExpectedWorkers:
    """Tracks the decode workers that one router may expect; prefill workers are not needed to answer."""

    def __init__(self, *, within_s: float, clock: Callable[[], float]) -> None:
        """`within_s`: how long after its end, or its first mention, a worker is expected; see `router.rejoin_s`."""
        self._within_s = within_s
        self._clock = clock
        self._who: dict[str, WorkerKey] = {}
        """The worker last found at each named address."""
        self._missing_since_s: dict[str, float] = {}
        """Time since which each named address has had no session."""
        self._here: set[WorkerKey] = set()
        self._relieved_s = -math.inf
        """Time at which a drained worker last left."""

    def named(self, addresses: Collection[str]) -> None:
        """Set the addresses that the directory currently names."""
        now_s = self._clock()
        self._who = {address: key for address, key in self._who.items() if address in addresses}
        absent = [address for address in addresses if self._who.get(address) not in self._here]
        self._missing_since_s = {address: self._missing_since_s.get(address, now_s) for address in absent}

    def found(self, address: str, key: WorkerKey) -> None:
        """Record the worker that answered at an address; it may still be rejected."""
        if address in self._missing_since_s:
            self._who[address] = key

    def joined(self, key: WorkerKey) -> None:
        self._here.add(key)
        for address in self._addresses_of(key):
            self._missing_since_s.pop(address, None)

    def left(self, key: WorkerKey, *, in_order: bool) -> None:
        """Record the end of a worker's session; `in_order`: it had drained."""
        now_s = self._clock()
        self._here.discard(key)
        for address in self._addresses_of(key):
            self._missing_since_s[address] = now_s
        if in_order:
            self._relieved_s = now_s

    def due_s(self, *, num_serving: int, num_leaving: int) -> float:
        """Return the seconds worth waiting for an expected worker, 0 for none, given how many serve and how many
        drain."""
        since_s = max(self._missing_since_s.values(), default=-math.inf)
        if not num_serving:
            if num_leaving:
                return math.inf
            since_s = max(since_s, self._relieved_s)
        return max(0.0, since_s + self._within_s - self._clock())

    def _addresses_of(self, key: WorkerKey) -> list[str]:
        return [address for address, found in self._who.items() if found == key]
