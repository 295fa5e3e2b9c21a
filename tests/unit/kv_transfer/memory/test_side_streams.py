"""A pool's copies beside an engine whose stream is a step ahead wait neither for it nor for each other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.runs import Runs
from kv_transfer.memory.side_streams import SideStreams
from kv_transfer.memory.torch_pool import TorchPool
from tandem.errors import TransferError
from tests.support.kv_transfer.plain_worker import layout
from tests.support.kv_transfer.stream_fakes import EngineAsleep, FakeCuda, FakeStream

KV = layout()
PAIRING = Pairing.from_layouts(KV, KV, wire_dtype=KV.dtype)
NUM_BLOCKS = 4
WAIT_S = 20.0
CELLS = CellRange(
    first_layer=0, num_layers=KV.num_layers, first_unit=0, num_units=2, first_head=0, num_heads=KV.num_kv_heads
)
READS: Runs = PAIRING.at_source(0, 0, (1, 3), NUM_BLOCKS).reads(CELLS)
WRITES: Runs = PAIRING.at_destination(0, (0, 2), NUM_BLOCKS).writes(CELLS)


def a_pool(cuda: FakeCuda, *, seed: int = 1, max_streams: int = 8) -> TorchPool:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (NUM_BLOCKS * KV.worker_block_bytes,), dtype=torch.uint8, generator=generator)
    return TorchPool(memory, KV, streams=SideStreams(cuda, memory.device, max_streams=max_streams))


@pytest.fixture
def cuda() -> FakeCuda:
    made = FakeCuda()
    made.engine.is_asleep = True
    return made


def payload() -> np.ndarray:
    return np.zeros(READS.num_bytes, np.uint8)


WORK: dict[str, Callable[[TorchPool], object]] = {
    "gather": lambda pool: pool.gather(READS, payload()),
    "scatter": lambda pool: pool.scatter(WRITES, payload()),
    "copy": lambda pool: pool.copy(
        PAIRING.at_source(0, 0, (1, 3), NUM_BLOCKS).run_pairs_to(PAIRING.at_destination(0, (0, 2), NUM_BLOCKS), CELLS)
    ),
    "send": lambda pool: pool.send(READS, pool, WRITES),
    "pack_summed": lambda pool: pool.pack_summed(READS),
    "unpack_summed": lambda pool: pool.unpack_summed(WRITES, pool.pack(READS)),
    "checksum": lambda pool: pool.checksum(READS),
    "blank": lambda pool: pool.blank(100),
}


def test_side_stream_fakes_detect_engine_wait() -> None:
    cuda = FakeCuda()
    side = FakeStream()
    side.wait_stream(cuda.default_stream())
    side.synchronize()
    cuda.engine.is_asleep = True
    with pytest.raises(EngineAsleep):
        side.synchronize()


@pytest.mark.parametrize("work", WORK)
def test_side_streams_do_not_wait_for_engine(cuda: FakeCuda, work: str) -> None:
    WORK[work](a_pool(cuda))
    (stream,) = cuda.made
    assert stream.priority < 0
    assert stream.log == ([] if work == "blank" else ["synchronized"])
    assert cuda.engine.log == []


@pytest.mark.parametrize("work", [work for work in WORK if work != "blank"])
def test_side_stream_thread_does_not_wait_for_another(cuda: FakeCuda, work: str) -> None:
    """One is blocked on the device until all others have done the same work."""
    pool = a_pool(cuda)
    held_up, go_on = threading.Event(), threading.Event()

    def wait_long() -> None:
        with pool.working():
            held_up.set()
            assert go_on.wait(WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(wait_long)
        assert held_up.wait(WAIT_S)
        try:
            threads.submit(WORK[work], pool).result(WAIT_S)
        finally:
            go_on.set()
        slow.result(WAIT_S)
    assert [stream.log for stream in cuda.made] == [["synchronized"]] * 2


def test_side_streams_are_reused_and_bounded(cuda: FakeCuda) -> None:
    pool = a_pool(cuda, max_streams=2)
    for _ in range(5):
        pool.checksum(READS)
    assert len(cuda.made) == 1, "one thread needs one"
    inside = threading.Barrier(2)
    going = threading.Barrier(2)

    def work(_turn: int) -> FakeStream:
        with pool.working():
            inside.wait(WAIT_S)
            going.wait(WAIT_S)
            return cuda.current_stream()

    with ThreadPoolExecutor(6) as threads:
        used = set(threads.map(work, range(6)))
    assert used == set(cuda.made)
    assert len(cuda.made) == 2


def test_side_stream_failure_is_awaited_before_memory_is_freed(cuda: FakeCuda) -> None:
    pool = a_pool(cuda)
    with pytest.raises(TransferError, match="payload"):
        pool.unpack_summed(READS, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(TransferError, match="no memory left"), pool.working():
        raise torch.OutOfMemoryError
    assert [stream.log for stream in cuda.made] == [["synchronized"] * 2]
    pool.checksum(READS)
    assert len(cuda.made) == 1, "and the stream is free again"


def test_side_streams_serve_lanes_without_kernel_as_sends(cuda: FakeCuda) -> None:
    pool = a_pool(cuda)
    sent = pool.lane_to(pool).start(READS, WRITES)
    assert sent.done()
    assert sent.result() == pool.checksum(READS)
    assert [stream.log for stream in cuda.made] == [["synchronized"] * 2]


@pytest.mark.parametrize("what", ["no memory", "cannot"])
def test_side_stream_is_free_after_kernel_has_not_started(cuda: FakeCuda, what: str) -> None:
    class Kernel:
        def launch(self, *_given: object) -> None:
            if what == "no memory":
                raise torch.OutOfMemoryError

    pool = a_pool(cuda)
    pool._kernel = Kernel()
    lane = pool.lane_to(pool)
    if what == "no memory":
        with pytest.raises(TransferError, match="no memory left"):
            lane.start(READS, WRITES)
    else:
        assert lane.start(READS, WRITES).result() == pool.checksum(READS)
    assert pool._streams._free == cuda.made
