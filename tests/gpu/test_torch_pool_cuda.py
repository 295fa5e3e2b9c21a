"""A pool in GPU memory beside an engine whose stream is a step ahead: nothing waits for that stream."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.torch_pool import TorchPool
from tandem.values.kv_layout import KVLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KV = KVLayout(model_fingerprint="x", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
PAIRING = Pairing.from_layouts(KV, KV, wire_dtype=KV.dtype)
NUM_BLOCKS = 64
HERE, THERE = (1, 5, 3, 9), (40, 41, 30, 50)
CELLS = CellRange(
    first_layer=0,
    num_layers=KV.num_layers,
    first_unit=0,
    num_units=len(HERE) * KV.block_size // PAIRING.mapping.unit_tokens,
    first_head=0,
    num_heads=KV.num_kv_heads,
)
SOURCE = PAIRING.at_source(0, 0, HERE, NUM_BLOCKS)
TARGET = PAIRING.at_destination(0, THERE, NUM_BLOCKS)
READS, WRITES = SOURCE.reads(CELLS), TARGET.writes(CELLS)
OTHERS = PAIRING.at_destination(0, (20, 60, 21, 10), NUM_BLOCKS).writes(CELLS)
SLEEP_CYCLES = 2_000_000_000
"""A second: what follows takes a millisecond."""


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    size = NUM_BLOCKS * KV.worker_block_bytes
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)
    torch.cuda.synchronize()
    return memory


@pytest.fixture(scope="module")
def pool() -> TorchPool:
    return TorchPool(noise(0), KV)


@contextmanager
def engine_asleep() -> Iterator[torch.cuda.Event]:
    """The engine's stream has work for a second; the yielded event is behind it."""
    torch.cuda.synchronize()
    behind = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    behind.record()
    try:
        yield behind
    finally:
        torch.cuda.synchronize()


WORK: dict[str, Callable[[TorchPool], object]] = {
    "checksum": lambda pool: pool.checksum(READS),
    "gather": lambda pool: pool.gather(READS, pool.allocate(READS.num_bytes)),
    "scatter": lambda pool: pool.scatter(WRITES, pool.allocate(READS.num_bytes)),
    "copy": lambda pool: pool.copy(SOURCE.run_pairs_to(TARGET, CELLS)),
    "send": lambda pool: pool.send(READS, pool, WRITES),
    "send in a lane": lambda pool: pool.lane_to(pool).start(READS, WRITES).result(),
    "pack and unpack": lambda pool: pool.unpack_summed(WRITES, pool.pack_summed(READS)[0]),
}


@pytest.mark.parametrize("work", WORK)
def test_torch_pool_does_not_wait_for_engine_stream(pool: TorchPool, work: str) -> None:
    WORK[work](pool)  # whatever the first call of anything waits for: kernels are loaded, memory is got
    with engine_asleep() as behind:
        WORK[work](pool)
        assert not behind.query(), "it has waited for the engine's stream"


def test_torch_pool_threads_get_right_bytes_beside_engine(pool: TorchPool) -> None:
    """Gathers, sends and checksums beside a sleeping engine use the right bytes."""
    expected = pool.checksum(READS)
    payload = pool.allocate(READS.num_bytes)

    def move(_turn: int) -> int:
        own = pool.allocate(READS.num_bytes)
        pool.gather(READS, own)
        assert (own == payload).all()
        return pool.checksum(READS)

    pool.gather(READS, payload)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(move, range(16))) == {expected}
        with engine_asleep() as behind:
            assert set(threads.map(move, range(16))) == {expected}
            assert not behind.query(), "a thread has waited for the engine's stream"
    assert pool.send(READS, pool, WRITES) == expected
    assert pool.checksum(WRITES) == expected


def test_torch_pool_kernel_moves_and_sums_as_plain_torch_does(pool: TorchPool) -> None:
    """Pools of its own, since the bytes of the other tests' pool change."""
    assert pool._kernel is not None, "triton is missing"
    found = []
    for plain in (False, True):
        source, target = (TorchPool(noise(seed), KV) for seed in (1, 2))
        if plain:
            source._kernel = target._kernel = None
        payload = source.allocate(READS.num_bytes)
        source.gather(READS, payload)
        sums = [source.checksum(READS), source.send(READS, target, WRITES), target.checksum(WRITES)]
        packed, summed = source.pack_summed(READS)
        sent = target.memory.clone()
        torch.cuda.synchronize()  # what follows does not wait for this stream
        sums += [summed, target.unpack_summed(OTHERS, packed)]
        target.scatter(READS, payload)
        lane = source.lane_to(target)
        under_way = [lane.start(READS, WRITES), lane.start(READS, OTHERS), lane.start(WRITES, READS)]
        sums += [each.result() for each in under_way]
        torch.cuda.synchronize()
        found.append((sums, payload, packed, sent, target.memory))
    (sums, payload, *tensors), (expected_sums, expected_payload, *expected_tensors) = found
    assert sums == expected_sums
    assert (payload == expected_payload).all()
    for tensor, expected in zip(tensors, expected_tensors, strict=True):
        assert torch.equal(tensor, expected)
