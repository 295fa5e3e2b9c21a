"""Replicates named caches between router processes that share a host's ports. Pure.

An update carries the whole state of a name: it may arrive twice, late, or in any order. A pin stays at its worker, with
which every process has a session; an update names the worker, so that each process can renew or end the pin there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router.api.request.named_caches import NamedCache, NamedCaches
from router.types.worker_view import WorkerKey
from router.workers.prefix_pins import PinRecord, PinRegistry
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLocation:
    """The worker that holds a pinned prefix."""

    worker: WorkerKey
    num_tokens: int
    last_block: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCacheUpdate:
    """The state of one name."""

    tenant: str
    name: str
    cache: NamedCache | None
    """The cache; None: it was removed."""
    pin: PinLocation | None = None


class SharedNamedCaches:
    """One process's caches and pins: makes updates for other processes and applies theirs."""

    def __init__(self, caches: NamedCaches, pins: PinRegistry, *, clock: Callable[[], float]) -> None:
        """`clock`: the clock that the pins use."""
        self._caches = caches
        self._pins = pins
        self._clock = clock

    def update_for(self, tenant: str, name: str) -> NamedCacheUpdate:
        """Return the update for one name, as it is here now."""
        return self._update(tenant, name, self._caches.find(tenant, name))

    def all_updates(self) -> list[NamedCacheUpdate]:
        """Return updates for all names, for a process that starts."""
        return [self._update(*one) for one in self._caches.all_entries()]

    def _update(self, tenant: str, name: str, cache: NamedCache | None) -> NamedCacheUpdate:
        record = None if cache is None else self._pins.find(tenant, name)
        if record is None:
            return NamedCacheUpdate(tenant=tenant, name=name, cache=cache)
        pin = PinLocation(worker=record.worker, num_tokens=record.num_tokens, last_block=record.last_block)
        return NamedCacheUpdate(tenant=tenant, name=name, cache=cache, pin=pin)

    def apply(self, update: NamedCacheUpdate) -> None:
        """Apply another process's update."""
        if not self._caches.apply_remote(update.tenant, update.name, update.cache):
            return
        if update.cache is None:
            self._pins.release(update.tenant, update.name)
            return
        ends_s = self._clock() + update.cache.expires_s - self._caches.clock()
        if update.pin is not None and self._pins.adopt(
            PinKey(update.tenant, update.name),
            PinRecord(
                worker=update.pin.worker,
                ends_s=ends_s,
                num_tokens=update.pin.num_tokens,
                last_block=update.pin.last_block,
                outcome=PinOutcome.HELD,
            ),
        ):
            return
        self._pins.prolong(update.tenant, update.name, ends_s)
