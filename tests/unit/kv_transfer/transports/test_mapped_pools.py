"""`memory` and `shm` with and without the compiled mover: unequal workers, cancels and revocations between bursts."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory import landing as landing_module
from kv_transfer.memory import mover as mover_module
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.mover import load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports import in_process, region_copy
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.interface import KVReceiver, PeerWriter, WriteOrder
from kv_transfer.transports.shm import receiver as shm_receiver
from kv_transfer.transports.shm import sender as shm_sender
from tandem.errors import TransferError
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
NUM_LAYERS, NUM_HEADS = 3, 4
POOL_TOKENS, NUM_TOKENS = 512, 256
WRITES = 8
"""Of the same cells, one after another."""
Ends = Callable[[Pairing], tuple[KVRegion, KVRegion, KVReceiver, PeerWriter]]


def layout(tp: int, block_size: int, head_dim: int = 16) -> KVLayout:
    return KVLayout(
        model_fingerprint="m",
        dtype="bfloat16",
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        head_dim=head_dim,
        block_size=block_size,
        tp_size=tp,
    )


@pytest.fixture(params=["compiled", "numpy"])
def bursts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved in small bursts, by one or the other."""
    monkeypatch.setattr(mover_module, "BURST_BYTES", 4096)
    monkeypatch.setattr(region_copy, "BURST_BYTES", 4096)
    if request.param == "numpy":
        for module in (landing_module, in_process, shm_receiver, shm_sender):
            monkeypatch.setattr(module, "load_mover", lambda: None)
    elif load_mover() is None:
        pytest.skip("without a C++ compiler chunks are moved by numpy")


@pytest.fixture(params=["memory", "shm"])
def ends(request: pytest.FixtureRequest, bursts: None) -> Iterator[Ends]:
    opened = []

    def open_ends(pairing: Pairing) -> tuple[KVRegion, KVRegion, KVReceiver, PeerWriter]:
        pools = [
            SharedPool(POOL_TOKENS // kv.block_size * kv.worker_block_bytes)
            for kv in (pairing.source, pairing.destination)
        ]
        source = KVRegion.from_buffer(pools[0].buffer, pairing.source, fd=pools[0].fd)
        target = KVRegion.from_buffer(pools[1].buffer, pairing.destination, fd=pools[1].fd)
        source.array()[:] = np.random.default_rng(1).integers(1, 256, source.array().size)
        fabric = MemoryFabric()
        [receiver] = open_receivers(target, choice=request.param, fabric=fabric)
        [(sender, offer)] = candidates([receiver.offer()], open_senders(source, fabric=fabric))
        writer = sender.connect(offer, pairing)
        opened.extend((writer, receiver, *pools))
        return source, target, receiver, writer

    yield open_ends
    for each in opened:
        each.close()


def blocks(kv: KVLayout, rng: random.Random, tokens: int = NUM_TOKENS) -> tuple[BlockId, ...]:
    return tuple(BlockId(b) for b in rng.sample(range(POOL_TOKENS // kv.block_size), tokens // kv.block_size))


def cell_range(pairing: Pairing, **changes: int) -> CellRange:
    whole = CellRange(
        first_layer=0,
        num_layers=NUM_LAYERS,
        first_unit=0,
        num_units=NUM_TOKENS // pairing.mapping.unit_tokens,
        first_head=0,
        num_heads=NUM_HEADS,
    )
    return replace(whole, **changes)


@pytest.mark.parametrize(
    ("source_kv", "target_kv"),
    [
        (layout(1, 16), layout(1, 16)),
        (layout(4, 16), layout(1, 16)),
        (layout(1, 8), layout(4, 32)),
        (layout(2, 32), layout(8, 8)),
    ],
)
def test_mapped_pools_of_unequal_layouts_equal_numpy(ends: Ends, source_kv: KVLayout, target_kv: KVLayout) -> None:
    rng = random.Random(3)
    pairing = Pairing.from_layouts(source_kv, target_kv, wire_dtype="bfloat16")
    source, target, receiver, writer = ends(pairing)
    read = pairing.at_source(0, 0, blocks(source_kv, rng), source.num_blocks)
    placed = pairing.at_destination(0, blocks(target_kv, rng), target.num_blocks)
    grant = receiver.open_grant(KEY, Landing(target, placed, pairing))
    half = cell_range(pairing).num_units // 2
    chunks = [
        cell_range(pairing, first_layer=layer, num_layers=1, first_unit=unit, num_units=half)
        for layer in range(NUM_LAYERS)
        for unit in (0, half)
    ]
    for cells in chunks:
        order = WriteOrder(key=KEY, grant=grant, cells=cells, source=read)
        result = writer.write(order).result(WAIT_S)
        assert not receiver.verify(KEY, cells, result.checksum ^ 1)
        assert receiver.verify(KEY, cells, result.checksum)
    expected = np.zeros_like(target.array())
    numpy_copy.copy(read.run_pairs_to(placed, cell_range(pairing)), source.array(), expected)
    numpy_copy.copy(placed.fan_out(cell_range(pairing)), expected, expected)
    assert np.array_equal(target.array(), expected)


def test_mapped_pool_under_load_nothing_moves_after_proof(ends: Ends) -> None:
    """Two hand-offs at a time, one revoked and one cancelled at random; their blocks are then reused."""
    kv, rng = layout(1, 16, head_dim=128), random.Random(4)
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    source, target, receiver, writer = ends(pairing)
    quiet: dict[TransferKey, threading.Event] = {}
    receiver.listen_quiet(lambda key: quiet[key].set())
    cells = target.array().reshape(NUM_LAYERS, -1, kv.layer_block_bytes)
    for attempt in range(1, 30):
        keys = [TransferKey(transfer_id=TransferId(name), attempt=attempt) for name in ("revoked", "cancelled")]
        halves = blocks(kv, rng, POOL_TOKENS)
        targets = halves[: len(halves) // 2], halves[len(halves) // 2 :]
        sources = blocks(kv, rng, POOL_TOKENS)
        read = [pairing.at_source(0, 0, part, source.num_blocks) for part in (sources[:16], sources[16:])]
        futures = []
        for key, to, origin in zip(keys, targets, read, strict=True):
            quiet[key] = threading.Event()
            landing = Landing(target, pairing.at_destination(0, to, target.num_blocks), pairing)
            grant = receiver.open_grant(key, landing)
            order = WriteOrder(key=key, grant=grant, cells=cell_range(pairing), source=origin)
            futures += [writer.write(order) for _ in range(WRITES)]
        with suppress(TransferError):
            futures[rng.randrange(2 * WRITES)].result(WAIT_S)
        assert writer.cancel(keys[1])
        moved = cells[:, targets[1]]
        for key in keys:
            if not receiver.revoke(key):
                assert quiet[key].wait(WAIT_S)
        assert np.array_equal(cells[:, targets[1]], moved), "bytes were moved after the cancel"
        target.array()[:] = 0
        for future in futures:
            with suppress(TransferError):
                future.result(WAIT_S)
        assert not target.array().any(), "bytes landed after the proof"


def test_mapped_pool_cancel_does_not_wait_for_whole_queue(ends: Ends) -> None:
    kv, rng = layout(1, 16), random.Random(5)
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    source, target, receiver, writer = ends(pairing)
    read = pairing.at_source(0, 0, blocks(kv, rng), source.num_blocks)
    placed = pairing.at_destination(0, blocks(kv, rng), target.num_blocks)
    grant = receiver.open_grant(KEY, Landing(target, placed, pairing))
    order = WriteOrder(key=KEY, grant=grant, cells=cell_range(pairing), source=read)
    futures = [writer.write(order) for _ in range(200)]
    assert writer.cancel(replace(KEY, attempt=2))
    assert not futures[-1].done()
    assert len({future.result(WAIT_S).checksum for future in futures}) == 1


def test_mapped_pool_without_compiler_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_mover.__wrapped__() is None
    [line] = caplog.messages
    assert "moved by numpy" in line
    assert "no C++ compiler" in line
