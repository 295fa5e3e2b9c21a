"""Sending ends whose writes go wrong as a whole: late, in another order, twice, in part, cut, damaged."""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.checksum import checksum_of
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.interface import KVSender, PeerWriter, WriteOrder, WriteResult
from tandem.errors import TransferError
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.network.proxies import RelayedReceiver
from tests.proofs.faults.plan import Kind, Place

_HOLD_S = 0.015


@dataclass(slots=True, kw_only=True, eq=False)
class _Late:
    """A write that has not been handed on yet, or whose end has not been reported yet."""

    order: WriteOrder
    outer: "Future[WriteResult]" = field(default_factory=Future)
    overtakable: bool = False


class FaultySender:
    """A KVSender around another one. `receiver_of`: the receiver of a region at the other end, in this process."""

    def __init__(
        self,
        inner: KVSender,
        injector: Injector,
        region: KVRegion,
        receiver_of: Callable[[int], RelayedReceiver],
        long_stall_s: float,
    ) -> None:
        self.name, self.one_sided = inner.name, inner.one_sided
        self.injector, self.region, self.receiver_of, self.long_stall_s = injector, region, receiver_of, long_stall_s
        self._inner = inner

    def reaches(self, offer: TransportOffer) -> bool:
        return self._inner.reaches(offer)

    def connect(self, offer: TransportOffer, pairing: Pairing) -> "FaultyWriter":
        return FaultyWriter(self._inner.connect(offer, pairing), self, pairing)


class FaultyWriter:
    """A PeerWriter around another one; `write` and `cancel` are called on the event loop."""

    def __init__(self, inner: PeerWriter, sender: FaultySender, pairing: Pairing) -> None:
        self._inner, self._sender, self._injector, self._pairing = inner, sender, sender.injector, pairing
        self._lock = threading.Lock()
        self._late: list[_Late] = []
        self._ended: set[TransferKey] = set()
        self._closing = False
        self._seen: deque[WriteOrder] = deque(maxlen=64)

    @property
    def closed(self) -> bool:
        return self._inner.closed

    @property
    def _receiver(self) -> RelayedReceiver:
        return self._sender.receiver_of(self._pairing.mapping.lane.destination)

    def cancel(self, key: TransferKey) -> bool:
        with self._lock:
            self._ended.add(key)
            late = [one for one in self._late if one.order.key == key]
            self._late = [one for one in self._late if one.order.key != key]
            stopped = self._inner.cancel(key)
        for one in late:
            _fail(one.outer, "write cancelled")
        return stopped

    def close(self) -> None:
        """See PeerWriter; a second time does nothing."""
        with self._lock:
            late, self._late = self._late, []
            first, self._closing = not self._closing, True
        for one in late:
            _fail(one.outer, "connection closed")
        if first:
            self._inner.close()

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        hit = self._injector.due(order.key.transfer_id, Place.ORDERS)
        self._seen.append(order)
        if hit is None:
            future = self._inner.write(order)
        else:
            kind, rng = hit[1].kind, random.Random(hit[1].seed)
            if kind is not Kind.REORDER:
                self._injector.suffered(order.key.transfer_id, kind, Place.ORDERS)
            future = self._faulty(order, kind, rng)
        for one in [one for one in self._late if one.overtakable and one.order is not order]:
            self._injector.suffered(one.order.key.transfer_id, Kind.REORDER, Place.ORDERS)
            self._submit(one)
        return future

    def _faulty(self, order: WriteOrder, kind: Kind, rng: random.Random) -> "Future[WriteResult]":
        match kind:
            case Kind.FLIP:
                return _after(self._inner.write(order), lambda result: self._flip(order, rng, result))
            case Kind.TRUNCATE:
                return self._write_part(order, rng)
            case Kind.REORDER:
                return self._delay(order, _HOLD_S, overtakable=True)
            case Kind.REPLAY:
                first = self._inner.write(order)
                again = self._write_again(order)
                self._write_stale(order)
                return first if again is None else _both(first, again)
            case Kind.STALL:
                return self._delay(order, rng.uniform(0.002, 0.04) if rng.random() < 0.8 else self._sender.long_stall_s)
            case _:
                asyncio.get_running_loop().run_in_executor(None, self.close)
                return self._inner.write(order)

    def _delay(self, order: WriteOrder, seconds: float, *, overtakable: bool = False) -> "Future[WriteResult]":
        late = _Late(order=order, overtakable=overtakable)
        with self._lock:
            if self._closing:
                _fail(late.outer, "connection closed")
                return late.outer
            self._late.append(late)
        asyncio.get_running_loop().call_later(seconds, self._submit, late)
        return late.outer

    def _submit(self, late: _Late) -> None:
        with self._lock:
            if late not in self._late:
                return
            self._late.remove(late)
            inner = self._inner.write(late.order)
        _pass_on(inner, late.outer, lambda result: result)

    def _flip(self, order: WriteOrder, rng: random.Random, result: WriteResult) -> WriteResult:
        """Called before the other end hears that these bytes have landed."""

        def harm(landing: Landing) -> None:
            views = self._receiving(landing).views(landing.cells.writes(order.cells))
            view = rng.choice(views)
            view[rng.randrange(len(view))] ^= rng.randint(1, 255)

        self._receiver.while_granted(order.key, harm)
        return result

    @staticmethod
    def _receiving(landing: Landing) -> KVRegion:
        return landing._region

    def _write_part(self, order: WriteOrder, rng: random.Random) -> "Future[WriteResult]":
        """Report that all of it was written, with its right checksum where that is known."""
        future = self._inner.write(replace(order, cells=_part(order.cells, rng)))
        if self._pairing.at_departure() is not None:
            return future
        checksum = checksum_of(self._sender.region.views(order.source.reads(order.cells)))
        return _after(future, lambda result: replace(result, checksum=checksum))

    def _write_again(self, order: WriteOrder) -> "Future[WriteResult] | None":
        """As long as its attempt is under way here: afterwards its sources are others'."""
        with self._lock:
            if order.key in self._ended or self._closing:
                return None
            return self._inner.write(order)

    def _write_stale(self, order: WriteOrder) -> None:
        """A write of an attempt that is over: nobody may take it."""
        receiver = self._receiver
        for stale in [seen for seen in self._seen if seen.key != order.key and receiver.is_quiet(seen.key)][-2:]:
            self._inner.write(stale).add_done_callback(lambda done, key=stale.key: self._check_refused(done, key))

    def _check_refused(self, done: "Future[WriteResult]", key: TransferKey) -> None:
        if done.exception() is None:
            self._injector.violations.append(f"{key}: a write was taken after its revocation")


def _part(cells: CellRange, rng: random.Random) -> CellRange:
    """Some of a box; a box of one cell as it is, without its checksum being any better for it."""
    if cells.num_units > 1:
        return replace(cells, num_units=rng.randrange(1, cells.num_units))
    if cells.num_layers > 1:
        return replace(cells, num_layers=rng.randrange(1, cells.num_layers))
    return replace(cells, num_heads=max(1, cells.num_heads // 2))


def _both(first: "Future[WriteResult]", again: "Future[WriteResult]") -> "Future[WriteResult]":
    """The first's result, once both have ended: a write is over when nothing reads or writes for it any more."""
    outer: Future[WriteResult] = Future()
    again.add_done_callback(lambda _done: _pass_on(first, outer, lambda result: result))
    return outer


def _after(inner: "Future[WriteResult]", change: Callable[[WriteResult], WriteResult]) -> "Future[WriteResult]":
    outer: Future[WriteResult] = Future()
    _pass_on(inner, outer, change)
    return outer


def _pass_on(
    inner: "Future[WriteResult]", outer: "Future[WriteResult]", change: Callable[[WriteResult], WriteResult]
) -> None:
    def done(ended: "Future[WriteResult]") -> None:
        error = ended.exception()
        with suppress(InvalidStateError):
            if error is None:
                outer.set_result(change(ended.result()))
            else:
                outer.set_exception(error)

    inner.add_done_callback(done)


def _fail(future: "Future[WriteResult]", reason: str) -> None:
    with suppress(InvalidStateError):
        future.set_exception(TransferError(reason))
