"""What router processes that share a host's doors tell each other of named caches. Pure.

A change is told as the whole of what there is: it may come twice, late, or in any order. A pin stays at its worker,
which every process has a session with; who hears of a name learns where that is, and renews or ends the pin there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router.api.request.named_caches import NamedCache, NamedCaches
from router.types.worker_view import WorkerKey
from router.workers.prefix_pins import PinRecord, PinRegistry
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PinPlace:
    """Where a prefix is kept."""

    worker: WorkerKey
    num_tokens: int
    last_block: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class NameNews:
    """What became of one name."""

    tenant: str
    name: str
    cache: NamedCache | None
    """None: it was removed."""
    pin: PinPlace | None = None


class SharedNames:
    """One process's caches and pins, as it tells others of them and hears of theirs."""

    def __init__(self, caches: NamedCaches, pins: PinRegistry, *, clock: Callable[[], float]) -> None:
        """`clock`: the pins' own."""
        self._caches = caches
        self._pins = pins
        self._clock = clock

    def news(self, tenant: str, name: str) -> NameNews:
        """Of one name, as it is here now."""
        return self._news(tenant, name, self._caches.find(tenant, name))

    def all_news(self) -> list[NameNews]:
        """Of all names, for a process that begins."""
        return [self._news(*one) for one in self._caches.everything()]

    def _news(self, tenant: str, name: str, cache: NamedCache | None) -> NameNews:
        record = None if cache is None else self._pins.find(tenant, name)
        if record is None:
            return NameNews(tenant=tenant, name=name, cache=cache)
        pin = PinPlace(worker=record.worker, num_tokens=record.num_tokens, last_block=record.last_block)
        return NameNews(tenant=tenant, name=name, cache=cache, pin=pin)

    def heard(self, news: NameNews) -> None:
        """What another process says."""
        if not self._caches.hear(news.tenant, news.name, news.cache):
            return
        if news.cache is None:
            self._pins.release(news.tenant, news.name)
            return
        ends_s = self._clock() + news.cache.expires_s - self._caches.clock()
        if news.pin is not None and self._pins.adopt(
            PinKey(news.tenant, news.name),
            PinRecord(
                worker=news.pin.worker,
                ends_s=ends_s,
                num_tokens=news.pin.num_tokens,
                last_block=news.pin.last_block,
                outcome=PinOutcome.HELD,
            ),
        ):
            return
        self._pins.prolong(news.tenant, news.name, ends_s)
