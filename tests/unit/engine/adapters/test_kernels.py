"""The compiled product of rows with their adapters against the reference in torch, on random shapes."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.adapters.kernels import MOST_ADAPTERS, TorchAdapters, adapted_rows
from engine.adapters.packing import RankAdapter, SiteMatrices, SitePart, decode_adapter, encode_adapter
from engine.kernels.cpu.adapters import CpuAdapters
from engine.kernels.cpu.gemm import Arithmetic
from engine.kernels.cpu.library import load_kernels
from tandem.errors import InvariantError
from tests.support.engine.paged_harness import needs

SITE = 5


def random_adapter(
    rng: random.Random, depth: int, columns: list[int], dtype: torch.dtype, *, shared: bool = False
) -> RankAdapter:
    """An adapter of one projection with these parts, of which each has matrices or none; `shared`: parts of one stored
    matrix, which read the same values.
    """
    chosen = [i for i in range(len(columns)) if rng.random() < 0.7] or [rng.randrange(len(columns))]
    ranks = [rng.randint(1, 19)] * len(chosen) if shared else [rng.randint(1, 19) for _ in chosen]
    num_values = ranks[0] if shared else sum(ranks)
    end, parts, value = num_values * depth, [], 0
    for i, rank in zip(chosen, ranks, strict=True):
        parts.append(SitePart(sum(columns[:i]), columns[i], 0 if shared else value, rank, end))
        value += rank
        end += rank * columns[i]
    values = torch.randn(end, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).mul_(0.3).to(dtype)
    return RankAdapter(sites=(SiteMatrices(SITE, num_values, 0, depth, tuple(parts)),), values=values)


def padded(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows that do not follow each other directly."""
    whole = torch.randn(rows, columns + 16, generator=torch.Generator().manual_seed(seed))
    return whole.to(dtype)[:, :columns]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_in_compiled_code_equal_torch(dtype: torch.dtype, seed: int) -> None:
    needs(Arithmetic.FLOAT32)
    rng = random.Random(seed)
    depth, columns = rng.randint(1, 300), [rng.randint(1, 700) for _ in range(rng.randint(1, 3))]
    ours = CpuAdapters(load_kernels(), dtype, num_threads=rng.randint(1, 2))
    theirs = TorchAdapters(torch.device("cpu"))
    slots = rng.sample(range(MOST_ADAPTERS), 3)
    for slot in slots:
        adapter = random_adapter(rng, depth, columns, dtype, shared=rng.random() < 0.3)
        ours.put(slot, adapter)
        theirs.put(slot, RankAdapter(sites=adapter.sites, values=adapter.values.double()))
    rows = rng.randint(1, 70)
    of_rows = np.array([rng.choice([-1, *slots]) for _ in range(rows)])
    wanted = np.array(sorted(rng.sample(range(rows), rng.randint(1, rows))))
    x, out = padded(rows, depth, dtype, seed), padded(rows, sum(columns), dtype, seed + 1)
    for kernels in (ours, theirs):
        kernels.begin(of_rows, wanted)
    for chosen in (np.arange(rows), wanted):
        given, before = x[chosen], out[chosen]
        exact = before.double()
        theirs.add_(SITE, given.double(), exact)
        got = before.clone()
        ours.add_(SITE, given, got)
        tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(got.double(), exact, **tolerance)
        untouched = of_rows[chosen] < 0
        assert torch.equal(got[untouched], before[untouched])
        for kernels in (ours, theirs):
            kernels.narrow()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_a_row_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    needs(Arithmetic.FLOAT32)
    rng = random.Random(4)
    alone, together = (CpuAdapters(load_kernels(), dtype, num_threads=threads) for threads in (1, 2))
    for slot in range(4):
        adapter = random_adapter(rng, 257, [300, 120, 120], dtype)
        alone.put(slot, adapter)
        together.put(slot, adapter)
    x, base = padded(64, 257, dtype, 1), padded(64, 540, dtype, 2)
    of_rows = np.array([rng.randrange(4) for _ in range(64)])
    together.begin(of_rows, None)
    whole = base.clone()
    together.add_(SITE, x, whole)
    for row in range(64):
        alone.begin(of_rows[row : row + 1], None)
        one = base[row : row + 1].clone()
        alone.add_(SITE, x[row : row + 1], one)
        assert torch.equal(one, whole[row : row + 1])


def test_adapters_leave_a_dropped_slot_empty() -> None:
    needs(Arithmetic.FLOAT32)
    rng = random.Random(9)
    kernels = CpuAdapters(load_kernels(), torch.float32, num_threads=1)
    kernels.put(2, random_adapter(rng, 8, [8], torch.float32))
    with pytest.raises(InvariantError, match="slot 2"):
        kernels.put(2, random_adapter(rng, 8, [8], torch.float32))
    kernels.drop(2)
    with pytest.raises(InvariantError, match="slot 2, which holds no adapter"):
        kernels.begin(np.array([-1, 2]), None)
    with pytest.raises(InvariantError, match="bfloat16"):
        kernels.put(2, random_adapter(rng, 8, [8], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_travel_to_other_ranks(dtype: torch.dtype) -> None:
    adapter = random_adapter(random.Random(1), 33, [20, 10, 10], dtype)
    slot, found = decode_adapter(memoryview(encode_adapter(7, adapter)))
    assert slot == 7
    assert found is not None
    assert found.sites == adapter.sites
    assert torch.equal(found.values, adapter.values)
    assert decode_adapter(memoryview(encode_adapter(7, None))) == (7, None)


def test_adapted_rows_are_numbered_among_those_wanted() -> None:
    rows, slots = adapted_rows(np.array([4, -1, 2, 2]), np.array([3, 1, 0]))
    assert rows.tolist() == [0, 2]
    assert slots.tolist() == [2, 4]
    assert len(adapted_rows(np.empty(0, dtype=np.int64), np.array([0, 1])).rows) == 0
