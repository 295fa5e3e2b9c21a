"""The kernel that copies and sums a chunk's runs, in triton's interpreter, against plain torch on the same pools."""

import functools
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import SETTING, interpreted, interpreting  # isort: skip
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.move_table import ALIGNMENTS
from kv_transfer.memory.torch_pool import TorchPool
from tests.support.kv_transfer.plain_worker import cells, layout, splits

with interpreting():
    run_kernel = importlib.import_module("kv_transfer.memory.run_kernel")

__all__ = ["interpreted"]

ROOT = Path(__file__).parents[4]
DTYPES = ("bfloat16", "float32", "fp8_e4m3", "int8")


@functools.cache
def shared_kernel():
    """One serves all pools, as a process has one: to make it launches every variant."""
    return run_kernel.RunKernel(torch.device("cpu"))


class NotedKernel:
    """A RunKernel, and what it was launched for."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.launched = []

    def launch(self, moves, source, target, stream):
        self.launched.append(moves)
        return self._kernel.launch(moves, source, target, stream)


class Pools:
    """The same bytes twice: the kernel works on one, and plain torch on the other."""

    def __init__(self, kv, num_blocks, generator, kernel=None):
        size = num_blocks * kv.worker_block_bytes
        memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        self.by_kernel, self.by_torch = TorchPool(memory, kv), TorchPool(memory.clone(), kv)
        self.by_kernel._kernel = NotedKernel(kernel or shared_kernel())
        self.launched = self.by_kernel._kernel.launched

    def assert_equal(self):
        assert torch.equal(self.by_kernel.memory, self.by_torch.memory)


class Case:
    """Some cells of a prompt in two random pools whose bytes correspond."""

    def __init__(self, seed, **given):
        rng = random.Random(seed)
        dtype, heads, layers = rng.choice(DTYPES), rng.choice([1, 2, 4, 6]), rng.choice([1, 2, 5])
        same = {"dtype": dtype, "heads": heads, "layers": layers, "head_dim": rng.choice([3, 8, 16, 64]), **given}
        tps = [tp for tp in (1, 2, 4) if splits(tp, heads)]
        here, there = (layout(**same, tp=rng.choice(tps), block_size=rng.choice([4, 8, 16])) for _ in range(2))
        pairing = Pairing.from_layouts(here, there, wire_dtype=dtype)
        num_tokens = 16 * rng.randint(1, 5)
        counts = [num_tokens // kv.block_size for kv in (here, there)]
        sizes = [count + rng.randint(0, 3) for count in counts]
        blocks = [self.blocks(rng, size, count) for size, count in zip(sizes, counts, strict=True)]
        self.source_cells = pairing.at_source(0, 0, blocks[0], sizes[0])
        self.target_cells = pairing.at_destination(0, blocks[1], sizes[1])
        num_units = num_tokens // pairing.mapping.unit_tokens
        first = rng.randrange(num_units)
        self.cells = cells(here, first, rng.randint(1, num_units - first), **self.some(rng, layers, heads))
        self.reads = self.source_cells.reads(self.cells)
        self.writes = self.target_cells.writes(self.cells)
        generator = torch.Generator().manual_seed(seed)
        self.source, self.target = Pools(here, sizes[0], generator), Pools(there, sizes[1], generator)

    @staticmethod
    def blocks(rng, pool_blocks, count):
        """Scattered, or one after another: then they are one run."""
        if rng.random() < 0.3:
            return tuple(range(pool_blocks - count, pool_blocks))
        return tuple(rng.sample(range(pool_blocks), count))

    @staticmethod
    def some(rng, layers, heads):
        first_layer, first_head = rng.randrange(layers), rng.randrange(heads)
        return {
            "first_layer": first_layer,
            "num_layers": rng.randint(1, layers - first_layer),
            "first_head": first_head,
            "num_heads": rng.randint(1, heads - first_head),
        }


def both(pools, work):
    """The result of `work` by the kernel, which plain torch must have as well."""
    before = len(pools.launched)
    found, expected = work(pools.by_kernel), work(pools.by_torch)
    assert len(pools.launched) == before + 1, "plain torch has stepped in"
    assert found == expected
    return found


def gathered(pool, runs):
    payload = pool.allocate(runs.num_bytes)
    pool.gather(runs, payload)
    return payload.tobytes()


@pytest.fixture(params=[4096, 64])
def block_words(request, monkeypatch):
    """The second makes programs of parts, and loops in them, of the tests' short runs."""
    monkeypatch.setattr(run_kernel, "BLOCK_WORDS", request.param)


@pytest.mark.parametrize("seed", range(16))
def test_run_kernel_moves_and_sums_as_plain_torch_does(seed, block_words):
    case = Case(seed)
    source, target, reads, writes = case.source, case.target, case.reads, case.writes
    total = both(source, lambda pool: pool.checksum(reads))
    payload = np.frombuffer(both(source, lambda pool: gathered(pool, reads)), np.uint8).copy()
    both(target, lambda pool: pool.scatter(writes, payload))
    target.assert_equal()
    assert both(target, lambda pool: pool.checksum(writes)) == total
    packed, found = source.by_kernel.pack_summed(reads)
    assert (packed.numpy().tobytes(), found) == (payload.tobytes(), total)
    for pools in (source, target):
        pools.by_kernel.memory.zero_(), pools.by_torch.memory.zero_()
    assert both(target, lambda pool: pool.unpack_summed(writes, packed)) == total
    target.assert_equal()


@pytest.mark.parametrize("seed", range(16))
def test_run_kernel_sends_and_fans_out_as_plain_torch_does(seed, block_words):
    case = Case(100 + seed)
    source, target = case.source, case.target
    ends = {source.by_kernel: target.by_kernel, source.by_torch: target.by_torch}
    total = both(source, lambda pool: pool.send(case.reads, ends[pool], case.writes))
    target.assert_equal()
    assert target.by_torch.checksum(case.writes) == total
    copies = case.target_cells.fan_out(case.cells)
    if copies.planes:
        both(target, lambda pool: pool.copy(copies))
        target.assert_equal()


def test_run_kernel_tests_meet_every_variant(monkeypatch):
    """Both alignments, with and without joined runs, several planes in a layer, copies to other ranks."""
    shared_kernel()
    monkeypatch.setattr(run_kernel.RunKernel, "launch", lambda *_: int)  # what it is launched for is enough
    cases = [Case(seed) for seed in range(16)] + [Case(100 + seed) for seed in range(16)]
    for case in cases:
        case.source.by_kernel.checksum(case.reads)
    tables = [case.source.launched[0] for case in cases]
    assert {table.alignment for table in tables} == set(ALIGNMENTS)
    assert {table.planes_per_layer for table in tables} >= {1, 2}
    assert {table.num_rows > 1 for table in tables} == {True, False}
    assert any(case.target_cells.fan_out(case.cells).planes for case in cases)


def test_run_kernel_leaves_unaligned_runs_to_plain_torch():
    kv = layout("fp8_e4m3", head_dim=1, block_size=2, heads=1)
    pairing = Pairing.from_layouts(kv, layout("fp8_e4m3", head_dim=1, block_size=1, heads=1), wire_dtype=kv.dtype)
    pools = Pools(kv, 4, torch.Generator().manual_seed(1))
    runs = pairing.at_source(0, 0, (2, 0), 4).reads(cells(kv, 1, 2))
    assert any(number % 4 for run in runs for number in run)
    assert pools.by_kernel.checksum(runs) == pools.by_torch.checksum(runs)
    assert not pools.launched


def test_run_kernel_leaves_memory_at_odd_addresses_to_plain_torch():
    case = Case(3)
    pools = case.source
    shifted = torch.empty(pools.by_torch.memory.numel() + 1, dtype=torch.uint8)[1:]
    pool = TorchPool(shifted.copy_(pools.by_torch.memory), pools.by_torch.layout)
    pool._kernel = pools.by_kernel._kernel
    assert pool.checksum(case.reads) == pools.by_torch.checksum(case.reads)
    assert not pools.launched


def test_run_kernel_table_of_many_runs_has_room(monkeypatch):
    """More runs than the tables that are kept have room for; then those are used again."""
    monkeypatch.setattr(run_kernel, "_TABLE_NUMBERS", 128)
    kv = layout(layers=2, head_dim=8, heads=1, block_size=4)
    num_blocks = 2 * run_kernel._TABLE_NUMBERS
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    blocks = tuple(range(0, num_blocks, 2))
    pools = Pools(kv, num_blocks, torch.Generator().manual_seed(1), run_kernel.RunKernel(torch.device("cpu")))
    for count in (len(blocks), 3, len(blocks)):
        runs = pairing.at_source(0, 0, blocks, num_blocks).reads(cells(kv, 0, count))
        assert both(pools, lambda pool, runs=runs: pool.checksum(runs))
    assert [table.num_numbers > run_kernel._TABLE_NUMBERS for table in pools.launched] == [True, False, True]


COMPILE = """
import json
from engine.kernels.triton.aot import compile_case
from engine.kernels.triton.aot_cases import AotCase
from kv_transfer.memory.move_table import ALIGNMENTS
from kv_transfer.memory.run_kernel import BLOCK_WORDS, move_runs_kernel
types = {"source_ptr": "*u8", "target_ptr": "*u8", "table_ptr": "*i64", "count_ptr": "*i64"}
types |= {"planes_per_layer": "i32", "layer_bytes": "i32"}
for alignment in ALIGNMENTS:
    for copies in (True, False):
        constants = {"COPIES": copies, "ALIGNMENT": alignment, "BLOCK": BLOCK_WORDS}
        name = f"move_runs {alignment} {copies}"
        found = compile_case(AotCase(name=name, kernel=move_runs_kernel, types=types, constants=constants))
        print(json.dumps([found.name, found.registers, found.spill_bytes]))
"""


@pytest.mark.turn(1)
def test_run_kernel_compiles_for_hopper(tmp_path):
    """In a new process: this one uses the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    assert all(registers <= 160 and not spilled for _, registers, spilled in rows), rows
