"""Chunks sent by compiled code against the same bytes gathered by numpy."""

import random
import shutil
import socket
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.strided_table import StridedBlocks, StridedLayoutTable
from kv_transfer.memory import socket_stream as module
from kv_transfer.memory.mover import RECIPE, Level, Mover
from kv_transfer.memory.socket_stream import CellStream, StreamStep
from kv_transfer.memory.write_stop_lock import BurstLock
from tandem.errors import TransferError
from tandem.native.build import COMPILERS, build
from tandem.native.library import NativeLibrary
from tests.unit.kv_transfer.memory.test_mover import cut_up, random_runs

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="without a C++ compiler sockets are served by Python"
)
WHOLE = CellRange(first_layer=0, num_layers=1, first_unit=0, num_units=1, first_head=0, num_heads=1)
CANARY = 0xA5
MAX_STEPS = 100_000


@pytest.fixture(params=list(Level), ids=lambda level: level.name.lower())
def mover(request: pytest.FixtureRequest) -> Mover:
    made = Mover(NativeLibrary(build(RECIPE)), request.param)
    if made.level != request.param:
        pytest.skip(f"this processor has no {request.param.name}")
    return made


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    with server, near, far:
        yield near, far


class Somewhere:
    """Runs anywhere in an array, in PlacedBytes' form."""

    def __init__(self, array: np.ndarray, runs: list[tuple[int, int]], *, num_blocks: int = 1) -> None:
        table = StridedLayoutTable([(0, 0)], [[runs]], num_layers=1, block_bytes=array.nbytes)
        self._place = StridedBlocks(table, array.ctypes.data, 1, [num_blocks - 1])

    def seek(self, _cells: CellRange) -> tuple[StridedBlocks, int]:
        return self._place, 0


def gathered(array: np.ndarray, runs: list[tuple[int, int]]) -> bytes:
    return b"".join(array[at : at + size].tobytes() for at, size in runs)


def open_pair(
    mover: Mover, sockets: tuple[socket.socket, socket.socket], here: Somewhere, there: Somewhere, lock: BurstLock
) -> tuple[CellStream, CellStream]:
    near, far = sockets
    going = mover.streams.open(here, WHOLE, near.fileno(), lock, is_sending=True)
    coming = mover.streams.open(there, WHOLE, far.fileno(), lock, is_sending=False)
    return going, coming


@pytest.mark.parametrize("seed", range(8))
def test_socket_stream_random_runs_arrive_exactly(
    mover: Mover, sockets: tuple[socket.socket, socket.socket], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(module, "BURST_BYTES", rng.choice((1000, 4096, 256 << 10)))
    total = rng.choice((1, 5000, 700_000, 9_000_000))
    source = np.random.default_rng(seed).integers(0, 256, 2 * total + 100, dtype=np.uint8)
    target = np.full(3 * total + 77, CANARY, np.uint8)
    lengths = cut_up(rng, total)
    reads, writes = (random_runs(rng, array.size, rng.sample(lengths, len(lengths))) for array in (source, target))
    payload = gathered(source, reads)
    expected, begin = target.copy(), 0
    for at, size in writes:
        expected[at : at + size] = np.frombuffer(payload[begin : begin + size], np.uint8)
        begin += size
    going, coming = open_pair(mover, sockets, Somewhere(source, reads), Somewhere(target, writes), BurstLock())
    assert going.num_bytes == coming.num_bytes == total
    left = [going, coming]
    for _ in range(MAX_STEPS):
        stream = rng.choice(left)
        if stream.advance() is StreamStep.DONE:
            left.remove(stream)
        assert coming.num_moved <= going.num_moved <= total
        if not left:
            break
    assert going.num_moved == coming.num_moved == total
    assert going.checksum == coming.checksum == zlib.crc32(payload)
    assert np.array_equal(target, expected)


def test_socket_stream_many_runs_take_several_calls(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    runs = [(2 * at, 1) for at in range(2500)]
    source = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    target = np.zeros(5000, np.uint8)
    going, coming = open_pair(mover, sockets, Somewhere(source, runs), Somewhere(target, runs), BurstLock())
    assert going.advance() is StreamStep.DONE
    assert coming.advance() is StreamStep.DONE
    assert gathered(target, runs) == gathered(source, runs)
    assert not target[1::2].any()


def test_socket_stream_contended_lock_is_released_after_each_burst(
    mover: Mover, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BURST_BYTES", 1000)
    lock = BurstLock()
    lock._wanted.value = 1
    source, target = np.full(3500, 7, np.uint8), np.zeros(3500, np.uint8)
    going, coming = open_pair(mover, sockets, Somewhere(source, [(0, 3500)]), Somewhere(target, [(0, 3500)]), lock)
    for stream in (going, coming):
        moved = []
        while stream.advance() is StreamStep.PAUSED:
            moved.append(stream.num_moved)
        assert moved == [1000, 2000, 3000]
    assert target.all()


def test_socket_stream_full_buffer_never_blocks(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    size = 32 << 20  # more than both sockets hold
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    going, coming = open_pair(
        mover, sockets, Somewhere(source, [(0, size)]), Somewhere(target, [(0, size)]), BurstLock()
    )
    assert coming.advance() is StreamStep.BLOCKED
    assert going.advance() is StreamStep.BLOCKED
    assert 0 < going.num_moved < size
    for _ in range(MAX_STEPS):
        if coming.advance() is StreamStep.DONE:
            break
        going.advance()
    assert target.all()


def test_socket_stream_reports_end_and_failure(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    source, target = np.ones(100, np.uint8), np.zeros(100, np.uint8)
    going, coming = open_pair(mover, sockets, Somewhere(source, [(0, 100)]), Somewhere(target, [(0, 100)]), BurstLock())
    near.sendall(b"x" * 40)
    near.shutdown(socket.SHUT_WR)
    while coming.advance() is StreamStep.BLOCKED:
        pass
    assert coming.advance() is StreamStep.ENDED
    assert coming.num_moved == 40
    assert coming.checksum == zlib.crc32(b"x" * 40)
    assert not target[40:].any()
    with pytest.raises(BrokenPipeError):  # and no signal
        going.advance()
    far.close()


def test_socket_stream_missing_cells_are_refused(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    target = np.zeros(100, np.uint8)
    with pytest.raises(TransferError, match="outside"):
        mover.streams.open(
            Somewhere(target, [(0, 100)], num_blocks=2), WHOLE, sockets[0].fileno(), BurstLock(), is_sending=False
        )


def test_socket_stream_without_checksum_computes_none(
    mover: Mover, sockets: tuple[socket.socket, socket.socket]
) -> None:
    source = np.ones(100, np.uint8)
    stream = mover.streams.open(
        Somewhere(source, [(0, 100)]), WHOLE, sockets[0].fileno(), BurstLock(), is_sending=True, with_checksum=False
    )
    assert stream.advance() is StreamStep.DONE
    assert stream.checksum == 0
    assert sockets[1].recv(200, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == source.tobytes()
