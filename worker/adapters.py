"""The LoRA adapters of one worker: loads them for the requests that name them, while those wait. On the event loop.

What is loaded, kept and evicted is decided by `worker.decisions.adapter_slots`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from tandem.adapters.files import Adapter, AdapterContent, read_adapter_content
from tandem.errors import AdapterUnavailable, ConfigError, InternalError, InvalidRequest, Overloaded, ServingError
from worker.decisions.adapter_slots import AdapterPlace, AdapterSlots, Ticket

_log = logging.getLogger(__name__)
_MOST_REFUSED = 256
"""Adapters that are remembered as unusable: a digest names what the files hold, so it stays true."""


class Packed(Protocol):
    """An adapter as the engine holds it."""

    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Packed)


class AdapterMemory(Protocol[P]):
    """Reads adapters, and holds them in slots (engine.adapters.store.AdapterStore)."""

    capacity_bytes: int
    num_slots: int

    @property
    def max_file_bytes(self) -> int:
        """Larger files cannot fit, whatever they hold."""

    def read(self, content: AdapterContent) -> P:
        """Read an adapter, on any thread. Raises ConfigError."""

    def put(self, slot: int, packed: P) -> None:
        """Hold an adapter; on the engine's thread."""

    def drop(self, slot: int) -> None:
        """Empty a slot; on the engine's thread."""


@dataclass(slots=True)
class AdapterTotals:
    """Loads since the worker's start."""

    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    """From the beginning of reading to the use in the next step; waiting for room included."""


class WorkerAdapters(Generic[P]):
    """Adapters that requests hold, and the loading of those that are not here."""

    def __init__(
        self,
        memory: AdapterMemory[P],
        *,
        call: Callable[[Callable[[], None]], Awaitable[None]],
        max_waiting: int,
    ) -> None:
        """`call` runs a function on the engine's thread between two steps, after all that was posted to it before;
        `max_waiting`: the most requests that wait for adapters at once."""
        self._memory = memory
        self._call = call
        self._max_waiting = max_waiting
        self._slots = AdapterSlots(capacity_bytes=memory.capacity_bytes, num_slots=memory.num_slots)
        # One thread: reading leaves the other cores to the engine.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._tickets = count(1)
        self._waiters: dict[Ticket, asyncio.Future[int]] = {}
        self._refused: dict[str, str] = {}
        """What is wrong with adapters that cannot be used, by digest, the newest last."""
        self._ordered: dict[str, Adapter] = {}
        """The files of those that are waited for, by digest."""
        self.totals = AdapterTotals()
        self._changed = asyncio.Event()
        """Set when somebody has released an adapter, or waits no longer."""
        self._loading: asyncio.Task[None] | None = None

    @property
    def residents(self) -> tuple[str, ...]:
        """Digests of the adapters that are loaded."""
        return self._slots.residents

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their adapter."""
        return self._slots.num_waiting

    @property
    def held_bytes(self) -> int:
        """Memory of the adapters that are loaded, of one rank."""
        return self._slots.held_bytes

    @property
    def capacity_bytes(self) -> int:
        """Memory for adapters, of one rank."""
        return self._slots.capacity_bytes

    async def hold(self, adapter: Adapter) -> int:
        """Hold an adapter: its slot, once it is loaded. Every call that returns needs one `release`.

        Raises InvalidRequest where the files hold no adapter for this model, AdapterUnavailable where others are here
        than those ordered, Overloaded where too many wait already.
        """
        ticket = next(self._tickets)
        if (slot := self._slots.hold(ticket, adapter.digest)) is not None:
            return slot
        try:
            if (reason := self._refused.get(adapter.digest)) is not None:
                raise ConfigError(reason)
            if self._slots.num_waiting > self._max_waiting:
                raise Overloaded(f"{self._max_waiting} requests wait for adapters", retry_after_s=1.0)
            return await self._wait(ticket, adapter)
        except ConfigError as error:
            raise InvalidRequest(f"adapter {adapter.name} cannot be used: {error}", param="model") from None
        finally:
            self._slots.withdraw(ticket)
            if not self._slots.is_wanted(adapter.digest):
                self._ordered.pop(adapter.digest, None)
            self._changed.set()

    async def _wait(self, ticket: Ticket, adapter: Adapter) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        self._ordered[adapter.digest] = adapter
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_all())
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # it came in the same turn
            raise
        finally:
            del self._waiters[ticket]

    def release(self, slot: int) -> None:
        """End a hold. What was posted to the engine before still has the adapter: it is replaced in a later call."""
        self._slots.release(slot)
        self._changed.set()

    async def close(self) -> None:
        """Load nothing more."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load_all(self) -> None:
        """Serve those that wait, in turn, until none is left."""
        try:
            while self._slots.num_waiting:
                self._grant()
                if (digest := self._slots.next_load()) is not None:
                    await self._load(digest)
        finally:
            self._loading = None

    async def _load(self, digest: str) -> None:
        adapter, begun_s = self._ordered[digest], time.monotonic()
        try:
            packed = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, adapter)
            if not self._slots.is_wanted(digest):
                return
            while (place := self._slots.place(digest, packed.num_bytes)) is None:
                self._changed.clear()
                await self._changed.wait()
                if not self._slots.is_wanted(digest):
                    self._slots.give_up(digest)
                    return
            await self._call(lambda: self._put(place, packed))
        except ServingError as error:
            self._fail(digest, error)
        except ConfigError as error:
            self._refuse(digest, error)
        except Exception:  # noqa: BLE001 - whoever waits is answered, whatever it was
            _log.exception("adapter %s could not be loaded", adapter.name)
            self._fail(digest, InternalError(f"adapter {adapter.name} could not be loaded"))
        else:
            self._slots.loaded()
            self.totals.loads += 1
            self.totals.evictions += len(place.evicted)
            self.totals.load_seconds += time.monotonic() - begun_s
            _log.info("adapter %s is loaded: %d bytes in slot %d", adapter.name, packed.num_bytes, place.slot)

    def _read(self, adapter: Adapter) -> P:
        """Read the files that were ordered, on the thread of its own. Raises ConfigError for what cannot be used,
        AdapterUnavailable for other files than those ordered.
        """
        if adapter.num_bytes > self._memory.max_file_bytes:
            most = self._memory.max_file_bytes
            raise ConfigError(f"its weights have {adapter.num_bytes} bytes, engine.adapter_bytes admits {most}")
        try:
            content = read_adapter_content(adapter.path, max_bytes=adapter.num_bytes)
        except ConfigError as error:
            _log.warning("adapter %s cannot be read here: %s", adapter.name, error)
            raise AdapterUnavailable("this worker cannot read the files of the adapter") from None
        if content.digest != adapter.digest:
            _log.warning("adapter %s: %s holds other files than those ordered", adapter.name, adapter.path)
            raise AdapterUnavailable("this worker has another version of the adapter's files")
        return self._memory.read(content)

    def _put(self, place: AdapterPlace, packed: P) -> None:
        for slot in place.evicted:
            self._memory.drop(slot)
        try:
            self._memory.put(place.slot, packed)
        except (MemoryError, RuntimeError) as error:  # torch's error where memory is short is a RuntimeError
            # Nobody uses the slot yet, and the next adapter overwrites it: no reason for the engine to end.
            raise InternalError(f"the adapter could not be copied: {type(error).__name__}") from error

    def _grant(self) -> None:
        for ticket, slot in self._slots.grants():
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.done():  # cancelled in this turn
                self._slots.release(slot)
            else:
                waiter.set_result(slot)

    def _refuse(self, digest: str, reason: ConfigError) -> None:
        """Answer those that wait, and all that will ask, that an adapter cannot be used."""
        self._refused[digest] = str(reason)
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._fail(digest, reason)

    def _fail(self, digest: str, error: ServingError | ConfigError) -> None:
        self.totals.failures += 1
        for ticket in self._slots.give_up(digest):
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
