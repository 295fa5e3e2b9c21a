"""While a device works nobody holds a lock that the event loop takes: orders, cancels and revocations go on.

And blocks are not reported free before the device has finished reading or writing them.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import ClaimReceiver, Writer, send_goodbye
from kv_transfer.transports.tcp.settings import TcpSettings
from tandem.errors import TransferError
from tests.support.kv_transfer.transport_needs import require
from tests.support.kv_transfer.transport_peer import cell_range, landing, order
from tests.unit.kv_transfer.transports.test_conformance import AWAY, KEY, WAIT_S, Pair, block_bytes, opened_as

T = TypeVar("T")
AWAY_FROM_HOST = {**{mode: ends for mode, ends in AWAY.items() if ends[0] == "device"}, "memory": ("device", "host")}
ONE_STREAM = TcpSettings(streams=1)
"""A second write waits for the first; on a stream of its own the device would read for it, too."""
LANDING_ON_DEVICE = ("tcp between devices", "torch_dist between devices")


class Busy:
    """A device that runs its work only when it is released, and signals it."""

    def __init__(self, pool: TorchPool) -> None:
        self.began, self._let_go = threading.Event(), threading.Event()
        self._really = pool.working
        pool.working = self._working  # type: ignore[method-assign]

    @contextmanager
    def _working(self) -> Iterator[None]:
        self.began.set()
        assert self._let_go.wait(WAIT_S)
        with self._really():
            yield

    def let_go(self) -> None:
        self._let_go.set()


def pool_of(region: KVRegion) -> TorchPool:
    assert isinstance(region.device, TorchPool)
    return region.device


@contextmanager
def opened(mode: str) -> Iterator[Pair]:
    name = mode.split(maxsplit=1)[0]
    require(name)
    with opened_as(name, ONE_STREAM, *AWAY_FROM_HOST[mode]) as pair:
        yield pair


@pytest.fixture
def loop() -> Iterator[Callable[[Callable[[], T]], T]]:
    """Does something as the event loop would: it must return, whatever the device does."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda fn: thread.submit(fn).result(WAIT_S / 2)


@pytest.fixture(params=AWAY_FROM_HOST)
def from_device(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Busy]]:
    with opened(request.param) as pair:
        busy = Busy(pool_of(pair.sender._region))
        try:
            yield pair, busy
        finally:
            busy.let_go()


def begin(pair: Pair, busy: Busy) -> tuple["Future[object]", bytes]:
    """A write whose sources the device is reading."""
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1, 2))
    future = pair.writer.write(order(KEY, grant, cell_range(0, 1), [5]))
    assert busy.began.wait(WAIT_S)
    return future, grant


def test_device_orders_are_accepted_during_device_read(from_device: tuple[Pair, Busy], loop) -> None:
    pair, busy = from_device
    first, grant = begin(pair, busy)
    second = loop(lambda: pair.writer.write(order(KEY, grant, cell_range(1, 1), [6])))
    assert not first.done()
    assert not second.done()
    busy.let_go()
    for unit, future in enumerate((first, second)):
        assert pair.receiver.verify(KEY, cell_range(unit, 1), future.result(WAIT_S).checksum)
    assert block_bytes(pair.target, [1, 2]) == block_bytes(pair.source, [5, 6])


def test_device_cancel_is_proven_after_device_read(from_device: tuple[Pair, Busy], loop) -> None:
    pair, busy = from_device
    under_way, grant = begin(pair, busy)
    queued = pair.writer.write(order(KEY, grant, cell_range(1, 1), [6]))
    assert loop(lambda: pair.writer.cancel(KEY)) is False
    with pytest.raises(TransferError, match="cancelled"):
        queued.result(WAIT_S)
    assert not under_way.done(), "its sources are being read"
    busy.let_go()
    with pytest.raises(TransferError, match="cancelled"):
        under_way.result(WAIT_S)
    assert loop(lambda: pair.writer.cancel(KEY)) is True
    assert not pair.writer.closed, "others go on"


def test_device_work_close_waits_for_device(from_device: tuple[Pair, Busy]) -> None:
    pair, busy = from_device
    under_way, _ = begin(pair, busy)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(pair.writer.close)
        while not pair.writer.closed:
            threading.Event().wait(0.001)
        assert not under_way.done()
        assert not closing.done()
        busy.let_go()
        closing.result(WAIT_S)
    with pytest.raises(TransferError):
        under_way.result(0)


@pytest.mark.parametrize("mode", LANDING_ON_DEVICE)
def test_device_revocation_is_proven_after_device_write(mode: str, loop) -> None:
    with opened(mode) as pair, ThreadPoolExecutor(1) as thread:
        busy = Busy(pool_of(pair.lands_in))
        try:
            grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
            write = order(KEY, grant, cell_range(0, 1), [5])

            def arrives() -> bool:
                result = pair.writer.write(write).result(WAIT_S)
                return pair.receiver.verify(KEY, write.cells, result.checksum)

            arriving = thread.submit(arrives)
            assert busy.began.wait(WAIT_S)
            assert loop(lambda: pair.receiver.revoke(KEY)) is False
            assert loop(lambda: pair.receiver.revoke(KEY)) is False, "nor when called again"
            assert not pair.quiet
            busy.let_go()
            assert pair.quieted.wait(WAIT_S)
            assert pair.quiet == [KEY]
            assert arriving.result(WAIT_S) is False
            assert pair.receiver.revoke(KEY) is True
        finally:
            busy.let_go()


def test_device_grant_ends_with_last_of_writer_and_own_device() -> None:
    with opened("cuda_ipc") as pair:
        receiver = pair.receiver
        assert isinstance(receiver, ClaimReceiver)
        for device_ends_first in (True, False):
            key = TransferKey(transfer_id=KEY.transfer_id, attempt=2 + device_ends_first)
            receiver.open_grant(key, landing(pair.lands_in, 1))
            grant = receiver._grants._by_key[key]
            ours, theirs = socket.socketpair()
            with ours, theirs:
                writer = Writer(sock=ours, claims={grant.token: key})
                receiver._writers.add(writer)
                moving = grant.moving()
                moving.__enter__()
                assert not receiver.revoke(key)
                ends = [
                    lambda moving=moving: moving.__exit__(None, None, None),
                    lambda w=writer, g=grant: receiver._on_message(w, one_sided_wire.ClaimKind.QUIET, g.token),
                ]
                first, last = ends if device_ends_first else ends[::-1]
                first()
                assert key not in pair.quiet
                assert not receiver.revoke(key)
                last()
                assert pair.quiet.count(key) == 1
                assert receiver.revoke(key)
                receiver._writers.discard(writer)


def test_device_receiver_end_waits_for_device_write() -> None:
    """Memory is freed after the socket's end, which promises that no write follows."""
    with opened("cuda_ipc") as pair:
        busy = Busy(pool_of(pair.sender._region))
        try:
            under_way, _ = begin(pair, busy)
            (theirs,) = pair.receiver._writers
            send_goodbye(theirs.sock)
            while not pair.writer.closed:
                threading.Event().wait(0.001)
            pair.writer._reader.join(0.2)
            assert pair.writer._reader.is_alive(), "it has hung up"
            assert not under_way.done()
            busy.let_go()
            pair.writer._reader.join(WAIT_S)
            assert not pair.writer._reader.is_alive()
            with pytest.raises(TransferError):
                under_way.result(WAIT_S)
        finally:
            busy.let_go()
