"""Chunks that land while others are verified, converted and revoked."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.checksum import crc32
from kv_transfer.memory.landing import Landing
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.grants import GrantTable, WriteGrant
from tandem.values.ids import TransferId
from tests.unit.kv_transfer.transports.test_conversions import POOL_BLOCKS, TARGETS, cells, layout, region

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
ROUNDS = 40


class Watched:
    """A landing of three bursts that notes whether its grant's lock is held."""

    is_on_device = False

    def __init__(self) -> None:
        self.grant: WriteGrant | None = None
        self.calls: list[tuple[str, bool]] = []
        self.settling = lambda _burst: None

    def _note(self, what: str) -> None:
        assert self.grant is not None
        self.calls.append((what, self.grant.lock._lock.locked()))

    def checksum(self, _cells: CellRange) -> int:
        return 7

    def num_settle_steps(self, _cells: CellRange) -> int:
        return 3

    def settle(self, _cells: CellRange, burst: int) -> None:
        self._note(f"settle {burst}")
        self.settling(burst)

    def judged(self, _cells: CellRange, *, intact: bool) -> None:
        self._note("intact" if intact else "damaged")


@pytest.fixture
def watched() -> tuple[GrantTable, Watched, WriteGrant]:
    table, landing = GrantTable(), Watched()
    pretended: Any = landing
    landing.grant = table.open(KEY, pretended)
    return table, landing, landing.grant


def test_landing_placement_and_discard_hold_lock(watched) -> None:
    table, landing, _ = watched
    assert table.verify(KEY, cells(), 7)
    assert landing.calls == [("settle 0", True), ("settle 1", True), ("settle 2", True), ("intact", True)]


def test_landing_damaged_chunk_is_dropped_under_lock(watched) -> None:
    table, landing, _ = watched
    assert not table.verify(KEY, cells(), 8)
    assert landing.calls == [("damaged", True)]


def test_landing_revocation_waits_for_one_piece_only(watched) -> None:
    table, landing, grant = watched
    revoking = threading.Thread(target=table.revoke, args=(KEY,))

    def settling(burst: int) -> None:
        if burst == 0:
            revoking.start()
            while not grant.lock._wanted.value:  # until it waits
                threading.Event().wait(0.001)

    landing.settling = settling
    assert not table.verify(KEY, cells(), 7)
    revoking.join(WAIT_S)
    assert [what for what, _ in landing.calls] == ["settle 0", "damaged"]
    assert not table.verify(KEY, cells(), 7), "and nothing of it is ever in place"


def test_landing_revocation_does_not_wait_for_device_and_notifies(watched) -> None:
    """The event loop revokes, and must not block until the device's write ends."""
    table, landing, _ = watched
    landing.is_on_device = True
    calls: list[TransferKey] = []
    table.listen_quiet(calls.append)

    def settling(burst: int) -> None:
        if burst == 0:
            assert table.revoke(KEY) is landing.grant
            assert table.revoke(KEY) is None, "a second call does the same"
            assert not table.is_quiet(KEY)
            assert not calls

    landing.settling = settling
    assert not table.verify(KEY, cells(), 7)
    assert landing.calls == [("settle 0", False), ("damaged", True)]
    assert table.is_quiet(KEY)
    assert calls == [KEY]


def test_landing_several_device_chunks_end_with_last(watched) -> None:
    table, landing, grant = watched
    landing.is_on_device = True
    calls: list[TransferKey] = []
    table.listen_quiet(calls.append)
    with grant.moving() as begun:
        assert begun
        with grant.moving() as begun:
            assert begun
            table.revoke(KEY)
        with grant.moving() as begun:
            assert not begun, "nothing begins after a revocation"
        assert not calls
    assert calls == [KEY]


def test_landing_ended_before_revocation_is_not_reported(watched) -> None:
    table, landing, _ = watched
    landing.is_on_device = True
    calls: list[TransferKey] = []
    table.listen_quiet(calls.append)
    assert table.verify(KEY, cells(), 7)
    table.revoke(KEY)
    assert table.is_quiet(KEY)
    assert not calls


def test_landing_from_several_threads_counts_room_once() -> None:
    """As the streams of `tcp` do: each reserves room under the lock."""
    pairing = Pairing.from_layouts(layout("bfloat16"), layout("bfloat16"), wire_dtype="int8")
    target = region(pairing.destination, 0)
    table = GrantTable()
    grant = table.open(KEY, Landing(target, pairing.at_destination(0, TARGETS, POOL_BLOCKS), pairing))

    def stream(unit: int) -> None:
        own = cells(first_unit=unit, num_units=1)
        for round_ in range(ROUNDS):
            with grant.lock:
                (room,) = grant.landing.room(own)
            room[:] = bytes([(unit + round_) % 100] * len(room))
            checksum = crc32(room, 0)
            with grant.lock:
                grant.landing.landed(own, checksum)
            intact = round_ == ROUNDS - 1
            assert table.verify(KEY, own, checksum + (not intact)) == intact

    with ThreadPoolExecutor(len(TARGETS)) as streams:
        list(streams.map(stream, range(len(TARGETS))))
    assert not grant.landing._staged
    assert not grant.landing._checksums
    assert table.revoke(KEY) is grant


def test_landing_places_nothing_after_revocation() -> None:
    pairing = Pairing.from_layouts(layout("bfloat16"), layout("bfloat16"), wire_dtype="int8")
    for round_ in range(20):
        target = region(pairing.destination, 0)
        table = GrantTable()
        grant = table.open(KEY, Landing(target, pairing.at_destination(0, TARGETS, POOL_BLOCKS), pairing))
        with grant.lock:
            (room,) = grant.landing.room(cells())
        room[:] = bytes([round_ + 1] * len(room))
        started = threading.Event()

        def verify(table: GrantTable = table, room: memoryview = room, started: threading.Event = started) -> None:
            started.set()
            table.verify(KEY, cells(), crc32(room, 0))

        thread = threading.Thread(target=verify)
        thread.start()
        started.wait(WAIT_S)
        table.revoke(KEY)
        after = bytes(target.buffer)
        thread.join(WAIT_S)
        assert bytes(target.buffer) == after
