"""The compiled mover against zlib, plain Python and numpy, with every kind of instructions that this machine has."""

import ctypes
import mmap
import random
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from kv_transfer.__main__ import main
from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.strided_table import StridedBlocks, StridedLayoutTable
from kv_transfer.memory import mover as module
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.mover import RECIPE, Level, Mover, load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.write_stop_lock import BurstLock, WriteStopLock
from tandem.errors import InvariantError, TransferError
from tandem.native.build import COMPILERS, build
from tandem.native.library import NativeLibrary
from tandem.values.ids import BlockId
from tandem.values.kv_layout import KVLayout

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="without a C++ compiler chunks are moved by numpy"
)
WHOLE = CellRange(first_layer=0, num_layers=1, first_unit=0, num_units=1, first_head=0, num_heads=1)
CANARY = 0xA5


@pytest.fixture(params=list(Level), ids=lambda level: level.name.lower())
def mover(request: pytest.FixtureRequest) -> Mover:
    made = Mover(NativeLibrary(build(RECIPE)), request.param)
    if made.level != request.param:
        pytest.skip(f"this processor has no {request.param.name}")
    return made


def open_gate(check: Callable[[], None] = lambda: None, lock: BurstLock | None = None) -> WriteStopLock:
    return WriteStopLock(check, lock or BurstLock())


class Somewhere:
    """Runs anywhere in an array, in PlacedBytes' form."""

    def __init__(self, array: np.ndarray, runs: list[tuple[int, int]]) -> None:
        table = StridedLayoutTable([(0, 0)], [[runs]], num_layers=1, block_bytes=array.nbytes)
        self._place = StridedBlocks(table, array.ctypes.data, 1, [0])

    def seek(self, _cells: CellRange) -> tuple[StridedBlocks, int]:
        return self._place, 0


def random_runs(rng: random.Random, size: int, lengths: list[int]) -> list[tuple[int, int]]:
    """Disjoint runs of these lengths in this order, anywhere in `size` bytes; some of them adjacent."""
    places = list(range(len(lengths)))
    rng.shuffle(places)
    spare = size - sum(lengths)
    cuts = sorted(rng.choice((rng.randrange(spare + 1), spare // 2)) for _ in lengths)
    offsets, used = [0] * len(lengths), 0
    for cut, place in zip(cuts, places, strict=True):
        offsets[place] = cut + used
        used += lengths[place]
    return list(zip(offsets, lengths, strict=True))


def cut_up(rng: random.Random, total: int) -> list[int]:
    lengths = []
    while total:
        length = min(total, rng.choice((1, 3, 16, 63, 64, 65, 255, 257, 1024, 4099, 9000, 40_000, 70_001)))
        lengths.append(length)
        total -= length
    rng.shuffle(lengths)
    return lengths


def test_mover_checksums_equal_zlib(mover: Mover) -> None:
    rng = random.Random(1)
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    sizes = [*range(600), *(rng.randrange(60_000) for _ in range(150)), 8192, 8191, 8193, 16_384, 65_000]
    for size in sizes:
        offset, value = rng.randrange(data.size - size + 1), rng.choice((0, rng.getrandbits(32)))
        found = mover.crc32(data.ctypes.data + offset, size, value)
        assert found == zlib.crc32(data[offset : offset + size].data, value), (size, offset, value)


@pytest.mark.parametrize("seed", range(12))
def test_mover_random_runs_move_exactly_and_touch_nothing_else(mover: Mover, seed: int) -> None:
    rng = random.Random(seed)
    total = rng.choice((1, 100, 5000, 300_000))
    source = np.random.default_rng(seed).integers(0, 256, 2 * total + 100, dtype=np.uint8)
    target = np.full(3 * total + 77, CANARY, np.uint8)
    reads = random_runs(rng, source.size, cut_up(rng, total))
    writes = random_runs(rng, target.size, cut_up(rng, total))
    payload = np.concatenate([source[at : at + size] for at, size in reads])
    expected, begin = target.copy(), 0
    for at, size in writes:
        expected[at : at + size] = payload[begin : begin + size]
        begin += size
    there = Somewhere(target, writes)
    for with_checksum in (True, False):
        target[:] = CANARY
        checksum, num_bytes = mover.move(
            Somewhere(source, reads), there, WHOLE, open_gate(), with_checksum=with_checksum
        )
        assert num_bytes == total
        assert checksum == (zlib.crc32(payload.data) if with_checksum else 0)
        assert np.array_equal(target, expected)
    assert mover.checksum(there, WHOLE) == zlib.crc32(payload.data)
    runs = mover.runs(there, WHOLE)
    assert b"".join(target[at : at + size].tobytes() for at, size in runs) == payload.tobytes()
    assert all(a + size != b for (a, size), (b, _) in pairwise(runs))


def test_mover_any_run_touches_nothing_beyond_its_ends(mover: Mover) -> None:
    """Guard pages on both sides of both regions: an access to one ends the process."""
    page, pages = mmap.PAGESIZE, 5
    memory = [mmap.mmap(-1, (pages + 2) * page) for _ in range(2)]
    whole = [np.frombuffer(each, np.uint8) for each in memory]
    inner = [each[page:-page] for each in whole]
    inner[0][:] = np.random.default_rng(2).integers(0, 256, pages * page, dtype=np.uint8)
    libc = ctypes.CDLL(None)
    guards = [each.ctypes.data + at for each in whole for at in (0, (pages + 1) * page)]
    try:
        for guard in guards:
            assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
        for skipped in (0, 1, 15, 64, 100, 4095):
            for begin, end in ((skipped, pages * page), (0, pages * page - skipped)):
                here, there = (Somewhere(each, [(begin, end - begin)]) for each in inner)
                inner[1][:] = 0
                checksum, _ = mover.move(here, there, WHOLE, open_gate())
                assert checksum == zlib.crc32(inner[0][begin:end].data) == mover.checksum(there, WHOLE)
                assert np.array_equal(inner[1][begin:end], inner[0][begin:end])
    finally:
        for guard in guards:
            libc.mprotect(ctypes.c_void_p(guard), page, 3)


def test_mover_empty_runs_move_nothing(mover: Mover) -> None:
    target = np.full(100, CANARY, np.uint8)
    nothing = Somewhere(target, [])
    assert mover.move(nothing, nothing, WHOLE, open_gate()) == (0, 0)
    assert mover.checksum(nothing, WHOLE) == 0
    assert mover.runs(nothing, WHOLE) == []
    assert (target == CANARY).all()


def test_mover_sides_of_different_sizes_are_refused(mover: Mover) -> None:
    data = np.zeros(100, np.uint8)
    for here, there in (([(0, 10)], [(20, 9)]), ([(0, 10)], [(20, 11)]), ([(0, 1)], []), ([], [(0, 1)])):
        with pytest.raises(InvariantError, match="differ in size"):
            mover.move(Somewhere(data, here), Somewhere(data, there), WHOLE, open_gate())


def test_mover_contended_lock_is_released_after_each_burst(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST_BYTES", 1000)
    source = np.random.default_rng(3).integers(0, 256, 10_500, dtype=np.uint8)
    reads = [(5000, 5500), (0, 333), (400, 4600), (333, 67)]
    payload = np.concatenate([source[at : at + size] for at, size in reads])
    for wanted, passes in ((True, 11), (False, 1)):
        target, lock, passed = np.zeros(10_500, np.uint8), BurstLock(), []
        lock._wanted.value = wanted
        gate = open_gate(lambda passed=passed: passed.append(1), lock)
        result = mover.move(Somewhere(source, reads), Somewhere(target, [(0, 10_500)]), WHOLE, gate)
        assert result == (zlib.crc32(payload.data), 10_500)
        assert np.array_equal(target, payload)
        assert len(passed) == passes


def test_mover_closed_gate_stops_after_current_piece(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST_BYTES", 4096)
    source, lock, left = np.full(20_000, 7, np.uint8), BurstLock(), [3]
    target = np.zeros(20_000, np.uint8)
    lock._wanted.value = 1

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise TransferError("cancelled")

    with pytest.raises(TransferError, match="cancelled"):
        mover.move(Somewhere(source, [(0, 20_000)]), Somewhere(target, [(0, 20_000)]), WHOLE, open_gate(check, lock))
    assert target.nonzero()[0].tolist() == list(range(3 * 4096))


def layout(tp: int, block_size: int, dtype: str = "bfloat16", heads: int = 4) -> KVLayout:
    return KVLayout(
        model_fingerprint="m",
        dtype=dtype,
        num_layers=3,
        num_kv_heads=heads,
        head_dim=8,
        block_size=block_size,
        tp_size=tp,
    )


def pool(kv: KVLayout, num_blocks: int, seed: int = 0) -> KVRegion:
    made = KVRegion.from_buffer(memoryview(bytearray(num_blocks * kv.worker_block_bytes)), kv)
    made.array()[:] = np.random.default_rng(seed).integers(1, 256, made.array().size) if seed else 0
    return made


CASES = [
    (layout(1, 8), layout(1, 8)),
    (layout(4, 8), layout(2, 8)),
    (layout(1, 8), layout(8, 4)),
    (layout(2, 4), layout(4, 16)),
    (layout(4, 16, "int8"), layout(1, 8, "int8")),
    (layout(2, 8, "int8", heads=1), layout(4, 8, "int8", heads=1)),
]


@pytest.mark.parametrize("pair", CASES, ids=lambda pair: " ".join(f"tp{kv.tp_size}x{kv.block_size}" for kv in pair))
def test_mover_between_unequal_layouts_equals_numpy(mover: Mover, pair: tuple[KVLayout, KVLayout]) -> None:
    rng = random.Random(str(pair))
    source_layout, target_layout = pair
    pairing = Pairing.from_layouts(*pair, wire_dtype=source_layout.dtype)
    unit, num_tokens, pool_tokens = pairing.mapping.unit_tokens, 64, 160
    held = target_layout.block_size
    source = pool(source_layout, pool_tokens // source_layout.block_size, seed=5)
    target = pool(target_layout, pool_tokens // target_layout.block_size)

    def blocks(kv: KVLayout, tokens: int) -> tuple[BlockId, ...]:
        numbers = rng.sample(range(pool_tokens // kv.block_size), tokens // kv.block_size)
        return tuple(BlockId(number) for number in numbers)

    read = pairing.at_source(held, 0, blocks(source_layout, num_tokens), source.num_blocks)
    placed = pairing.at_destination(held, blocks(target_layout, num_tokens - held), target.num_blocks)
    here = CellAddresses(source, read, is_source=True)
    there = CellAddresses(target, placed, is_source=False)
    num_units = (num_tokens - held) // unit
    for _ in range(40):
        layer, head, first = rng.randrange(3), rng.randrange(source_layout.num_kv_heads), rng.randrange(num_units)
        whole = rng.random() < 0.5
        cells = CellRange(
            first_layer=layer,
            num_layers=rng.randint(1, 3 - layer),
            first_unit=first,
            num_units=rng.randint(1, num_units - first),
            first_head=0 if whole else head,
            num_heads=source_layout.num_kv_heads if whole else rng.randint(1, source_layout.num_kv_heads - head),
        )
        expected = np.zeros_like(target.array())
        numpy_copy.copy(read.run_pairs_to(placed, cells), source.array(), expected)
        payload = b"".join(source.views(read.reads(cells)))
        target.array()[:] = 0
        assert mover.move(here, there, cells, open_gate()) == (zlib.crc32(payload), len(payload))
        assert np.array_equal(target.array(), expected)
        assert mover.checksum(here, cells) == mover.checksum(there, cells) == zlib.crc32(payload)
        assert b"".join(bytes(target.buffer[at : at + size]) for at, size in mover.runs(there, cells)) == payload


def test_mover_missing_cells_are_refused_before_any_move(mover: Mover) -> None:
    kv = layout(1, 8)
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    source, target = pool(kv, 6, seed=1), pool(kv, 6)
    here = CellAddresses(source, pairing.at_source(0, 0, (BlockId(1), BlockId(4)), 6), is_source=True)
    there = CellAddresses(target, pairing.at_destination(0, (BlockId(2), BlockId(3)), 6), is_source=False)
    good = {"first_layer": 0, "num_layers": 3, "first_unit": 0, "num_units": 2, "first_head": 0, "num_heads": 4}
    wrong = [
        {"num_layers": 4},
        {"num_layers": 0},
        {"first_layer": 3},
        {"first_layer": -1},
        {"first_unit": 1},
        {"first_unit": -1},
        {"num_units": 0},
        {"num_units": 3},
        {"num_units": 1 << 60},
        {"first_head": 1},
        {"num_heads": 0},
        {"num_heads": 5},
        {"first_head": -1, "num_heads": 2},
    ]
    for change in wrong:
        cells = CellRange(**{**good, **change})
        for call in (
            lambda cells=cells: mover.move(here, there, cells, open_gate()),
            lambda cells=cells: mover.checksum(there, cells),
            lambda cells=cells: mover.runs(here, cells),
        ):
            with pytest.raises(TransferError, match="outside"):
                call()
    for block in (6, -1, 1 << 40):
        nowhere = CellAddresses(target, pairing.at_destination(0, (BlockId(2), BlockId(block)), 6), is_source=False)
        with pytest.raises(TransferError, match="outside the KV region"):
            mover.move(here, nowhere, CellRange(**good), open_gate())
    assert not target.array().any()


def test_cell_addresses_held_tokens_within_unit_are_refused() -> None:
    kv = layout(1, 8)
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    with pytest.raises(TransferError, match="held_tokens 4 is not a multiple of 8"):
        CellAddresses(pool(kv, 6), pairing.at_source(4, 0, (BlockId(1),), 6), is_source=True)


def test_mover_library_can_be_built_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert "KV mover ready" in capsys.readouterr().out


def test_mover_is_shared_by_the_process() -> None:
    assert load_mover() is load_mover()
    assert isinstance(load_mover(), Mover)
