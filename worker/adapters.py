"""The LoRA adapters of one worker: loads them for the requests that name them, while those wait. On the event loop.

What is loaded, kept and evicted is decided by `worker.decisions.adapter_slots`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tandem.adapter_files import Adapter, read_adapter
from tandem.errors import ConfigError, InternalError, InvalidRequest, Overloaded, ServingError, Unavailable
from worker.decisions.adapter_slots import AdapterPlace, AdapterSlots, Ticket

_log = logging.getLogger(__name__)


class Packed(Protocol):
    """An adapter as the engine holds it."""

    @property
    def num_bytes(self) -> int: ...


P = TypeVar("P", bound=Packed)


class AdapterMemory(Protocol[P]):
    """Reads adapters, and holds them in slots (engine.adapters.store.AdapterStore)."""

    capacity_bytes: int
    num_slots: int

    def read(self, path: Path) -> P:
        """Read an adapter, on any thread. Raises ConfigError."""

    def put(self, slot: int, packed: P) -> None:
        """Hold an adapter; on the engine's thread."""

    def drop(self, slot: int) -> None:
        """Empty a slot; on the engine's thread."""


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
        self._ordered: dict[str, Adapter] = {}
        """The files of those that are waited for, by digest."""
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

    async def hold(self, adapter: Adapter) -> int:
        """Hold an adapter: its slot, once it is loaded. Every call that returns needs one `release`.

        Raises InvalidRequest where the files hold no adapter for this model, Unavailable where others are here than
        those ordered, Overloaded where too many wait already.
        """
        ticket = next(self._tickets)
        if self._slots.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._slots.num_waiting} requests wait for adapters", retry_after_s=1.0)
        if (slot := self._slots.hold(ticket, adapter.digest)) is not None:
            return slot
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
            self._slots.withdraw(ticket)
            if not self._slots.is_wanted(adapter.digest):
                self._ordered.pop(adapter.digest, None)
            self._changed.set()

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
        adapter = self._ordered[digest]
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
        except ValueError as error:
            self._fail(digest, InvalidRequest(f"adapter {adapter.name}: {error} (engine.adapter_bytes)", param="model"))
        except Exception:  # noqa: BLE001 - whoever waits is answered, whatever it was
            _log.exception("adapter %s could not be loaded", adapter.name)
            self._fail(digest, InternalError(f"adapter {adapter.name} could not be loaded"))
        else:
            self._slots.loaded()
            _log.info("adapter %s is loaded: %d bytes in slot %d", adapter.name, packed.num_bytes, place.slot)

    def _read(self, adapter: Adapter) -> P:
        """Read the files that were ordered, on the thread of its own.

        Identified after they were read: files that are replaced meanwhile are noticed.
        """
        packed, wrong = None, ""
        try:
            packed = self._memory.read(adapter.path)
        except ConfigError as error:
            wrong = str(error)
        try:
            found = read_adapter(adapter.name, adapter.path)
        except ConfigError as error:
            _log.warning("adapter %s cannot be read here: %s", adapter.name, error)
            raise Unavailable(f"adapter {adapter.name} cannot be read by this worker", retry_after_s=1.0) from None
        if found.digest != adapter.digest:
            raise Unavailable(
                f"adapter {adapter.name}: this worker has another version of its files", retry_after_s=1.0
            )
        if packed is None:
            raise InvalidRequest(f"adapter {adapter.name} cannot be used: {wrong}", param="model")
        return packed

    def _put(self, place: AdapterPlace, packed: P) -> None:
        for slot in place.evicted:
            self._memory.drop(slot)
        self._memory.put(place.slot, packed)

    def _grant(self) -> None:
        for ticket, slot in self._slots.grants():
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.done():  # cancelled in this turn
                self._slots.release(slot)
            else:
                waiter.set_result(slot)

    def _fail(self, digest: str, error: ServingError) -> None:
        for ticket in self._slots.give_up(digest):
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
