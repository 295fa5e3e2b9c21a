"""Compiled paged attention: against float64, and against itself, bit for bit, however rows are cut and batched."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels.cpu.attention import CpuAttentionShape, PagedAttention
from engine.kernels.cpu.library import CpuFeatures, load_kernels
from engine.kernels.cpu.measure_attention import AttentionBench, step_over
from tandem.errors import ConfigError, InvariantError

HEAD_DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
TOLERANCE = {torch.float32: {"atol": 3e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 6e-3, "rtol": 8e-3}}


@pytest.fixture(scope="module")
def library():
    return load_kernels()


@pytest.fixture(scope="module", params=["this processor", "no AMX", "no AVX512"])
def limited(request, library):
    """The library on processors with fewer features: every kernel runs, whatever this machine offers."""
    seen = copy.copy(library)
    if request.param == "no AMX":
        seen.features = replace(library.features, amx_bf16=False, amx_int8=False)
    if request.param == "no AVX512":
        seen.features = CpuFeatures.from_bits(1)
    return seen


class Case:
    """A shape, sequences on shuffled blocks among foreign ones, and the expected attention over them."""

    def __init__(self, rng, dtype, *, starts, counts, **shape):
        self.shape = CpuAttentionShape(
            num_kv_heads=shape.pop("num_kv_heads", 2),
            num_heads=shape.pop("num_heads", 4),
            head_dim=shape.pop("head_dim", 64),
            block_size=shape.pop("block_size", 16),
            dtype=dtype,
        )
        self.window = shape.pop("window", None)
        size = self.shape.block_size
        num_blocks = sum(-(-(s + c) // size) for s, c in zip(starts, counts, strict=True)) + 5
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        blocks = torch.randperm(num_blocks, generator=generator).numpy()
        self.inputs = step_over(starts, counts, size, blocks[:-1], spare=int(blocks[-1]))
        s = self.shape
        self.cache = torch.randn(num_blocks, 2, s.num_kv_heads, size, s.head_dim, generator=generator).to(dtype)
        rows, heads = int(self.inputs.counts.sum()), s.num_heads + 2 * s.num_kv_heads
        self.qkv = torch.randn(rows, heads, s.head_dim, generator=generator).to(dtype)

    def attend(self, library, *, threads=2, deterministic=False):
        attention = PagedAttention(library, self.shape, num_threads=threads, deterministic=deterministic)
        metadata = attention.plan(self.inputs)
        out = torch.full((self.qkv.shape[0], self.shape.num_heads * self.shape.head_dim), math.nan).to(self.shape.dtype)
        attention.attend(self.cache, self.qkv[:, : self.shape.num_heads], metadata, self.window, out)
        return out

    def tokens(self, sequence):
        """Keys and values of a sequence, `[2, num_kv_heads, length, head_dim]`, in float64."""
        length = int(self.inputs.lengths[sequence])
        table = self.inputs.tables[sequence, : -(-length // self.shape.block_size)]
        return self.cache[torch.from_numpy(table)].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]

    def expected(self):
        out, row = [], 0
        for i, (start, count) in enumerate(zip(self.inputs.starts, self.inputs.counts, strict=True)):
            keys, values = self.tokens(i).repeat_interleave(self.shape.group_size, dim=1)
            queries = self.qkv[row : row + count, : self.shape.num_heads].double()
            scores = torch.einsum("rhd,hkd->hrk", queries, keys) / math.sqrt(self.shape.head_dim)
            position, key = torch.arange(start, start + count)[:, None], torch.arange(keys.shape[1])
            hidden = key > position
            if self.window is not None:
                hidden |= key <= position - self.window
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out.append(torch.einsum("hrk,hkd->rhd", weights, values).flatten(1))
            row += count
        return torch.cat(out)

    def check(self, library, **options):
        torch.testing.assert_close(
            self.attend(library, **options).double(), self.expected(), **TOLERANCE[self.shape.dtype]
        )


def random_case(rng, dtype, **fixed):
    num_seqs = rng.randint(1, 5)
    num_kv_heads = rng.choice([1, 2, 3])
    values = {
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.choice(GROUPS),
        "head_dim": rng.choice(HEAD_DIMS),
        "block_size": rng.choice([16, 16, 32, 4]),
        "window": rng.choice([None, None, 1, 3, 16, 70, 256]),
        "starts": [rng.choice([0, 0, 1, 15, 16, 63, 64, 130, 515]) for _ in range(num_seqs)],
        "counts": [rng.choice([1, 1, 1, 2, 16, 17, 33, 90]) for _ in range(num_seqs)],
    }
    return Case(rng, dtype, **{**values, **fixed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(24))
def test_cpu_attention_random_steps_equal_float64(limited, dtype, seed):
    rng = random.Random(seed)
    case = random_case(rng, dtype, head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)])
    case.check(limited, threads=1 + seed % 2, deterministic=seed % 3 == 0)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_attention_every_group_size_decodes(limited, dtype, group):
    rng = random.Random(group)
    case = Case(rng, dtype, starts=[200, 64, 63, 0], counts=[1] * 4, num_kv_heads=2, num_heads=2 * group)
    case.check(limited)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_cpu_attention_long_sequence_is_split_among_threads(limited, head_dim, window):
    rng = random.Random(1)
    shape = {"num_kv_heads": 1, "num_heads": 3, "head_dim": head_dim, "window": window}
    case = Case(rng, torch.bfloat16, starts=[2100], counts=[1], **shape)
    attention = PagedAttention(limited, case.shape, num_threads=2)
    if limited.features.avx512_bf16:
        assert attention.plan(case.inputs).step.num_segments == 8
    case.check(limited)


def test_cpu_attention_long_prefix_and_window_match_reference(limited):
    rng = random.Random(2)
    for dtype in (torch.float32, torch.bfloat16):
        for window in (None, 600):
            Case(rng, dtype, starts=[1090, 0], counts=[100, 530], window=window).check(limited)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_cpu_attention_ignores_foreign_slots(limited, dtype, head_dim):
    """Tables point at a foreign block beyond a sequence's end; it and all unused slots hold NaN."""
    rng = random.Random(3)
    shape = {"starts": [70, 14, 0, 33, 0], "counts": [1, 1, 1, 20, 37], "head_dim": head_dim}
    case = Case(rng, dtype, **shape)
    clean = case.attend(limited)
    used = torch.zeros(case.cache.shape[0], case.shape.block_size, dtype=torch.bool)
    for table, length in zip(case.inputs.tables, case.inputs.lengths, strict=True):
        positions = np.arange(length)
        used[table[positions // 16], positions % 16] = True
    case.cache.masked_fill_(~used[:, None, None, :, None], math.nan)
    assert torch.equal(case.attend(limited), clean)
    assert clean.isfinite().all()


def test_cpu_attention_nan_query_affects_its_row_only(limited):
    case = Case(random.Random(4), torch.bfloat16, starts=[40, 8], counts=[1, 40])
    clean = case.attend(limited)
    case.qkv[11] = math.nan
    spoiled = case.attend(limited)
    assert spoiled[11].isnan().all()
    spoiled[11] = clean[11]
    assert torch.equal(spoiled, clean)


def test_cpu_attention_large_scores_do_not_overflow(limited):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(random.Random(5), dtype, starts=[100, 0], counts=[1, 90])
        case.qkv.mul_(64.0)
        out = case.attend(limited)
        torch.testing.assert_close(out.double(), case.expected(), atol=2e-2, rtol=2e-2)


def in_parts(case, library, parts, companions):
    """The rows of a case's only sequence, computed part by part, each batched with others."""
    rows, start, table = [], 0, case.inputs.tables[0]
    for count in parts:
        others = random.Random(start).choice(companions)
        starts, counts = [start, *(s for s, _ in others)], [count, *(c for _, c in others)]
        place = sorted(range(len(starts)), key=lambda i: (counts[i] > 1, -starts[i])).index(0)
        inputs = step_over(starts, counts, case.shape.block_size, np.resize(table, 200))
        needed = -(-(start + count) // case.shape.block_size)
        inputs.tables[place, :needed] = table[:needed]
        begin = int(inputs.counts[:place].sum())
        part = copy.copy(case)
        part.inputs = inputs
        part.qkv = torch.randn(int(inputs.counts.sum()), *case.qkv.shape[1:]).to(case.qkv.dtype)
        part.qkv[begin : begin + count] = case.qkv[start : start + count]
        rows.append(part.attend(library, deterministic=True, threads=1 + start % 2)[begin : begin + count])
        start += count
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, None), (80, 3, 100), (32, 16, 37), (128, 1, None)])
def test_cpu_attention_row_is_bitwise_independent_of_batch(limited, dtype, head_dim, group, window):
    rng = random.Random(head_dim)
    shape = {"num_kv_heads": 2, "num_heads": 2 * group, "head_dim": head_dim, "window": window}
    count = 560 if dtype is torch.bfloat16 else 150
    case = Case(rng, dtype, starts=[0], counts=[count], **shape)
    whole = case.attend(limited, deterministic=True)
    assert torch.equal(case.attend(limited, deterministic=True, threads=1), whole)
    companions = [[], [(40, 1)], [(700, 1), (3, 20)], [(5, 9), (1, 1)]]
    tail = 60  # one by one, as decoding does
    parts = []
    while sum(parts) < count - tail:
        parts.append(min(rng.choice([1, 2, 16, 31, 100, 130]), count - tail - sum(parts)))
    assert torch.equal(in_parts(case, limited, parts + [1] * tail, companions), whole)


def test_cpu_attention_thread_count_changes_no_bit(library):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(random.Random(6), dtype, starts=[300, 17, 0], counts=[1, 1, 70])
        assert torch.equal(case.attend(library, threads=1), case.attend(library, threads=2))


def test_cpu_attention_empty_step_does_nothing(library):
    shape = CpuAttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    attention = PagedAttention(library, shape, num_threads=2)
    metadata = attention.plan(step_over([], [], 16, np.empty(0, dtype=np.int64)))
    cache = torch.zeros(1, 2, 2, 16, 64, dtype=torch.bfloat16)
    queries, out = torch.empty(0, 4, 64, dtype=torch.bfloat16), torch.empty(0, 256, dtype=torch.bfloat16)
    attention.attend(cache, queries, metadata, None, out)
    assert (metadata.num_rows, metadata.num_units, metadata.num_singles) == (0, 0, 0)


def test_cpu_attention_mismatched_tensors_are_refused(library):
    case = Case(random.Random(7), torch.bfloat16, starts=[3], counts=[5])
    attention = PagedAttention(library, case.shape, num_threads=1)
    metadata = attention.plan(case.inputs)
    queries, out = case.qkv[:, :4], torch.empty(5, 256, dtype=torch.bfloat16)
    attention.attend(case.cache, queries, metadata, None, out)
    for wrong in (
        (case.cache.float(), queries, metadata, None, out),
        (case.cache, queries[1:], metadata, None, out),
        (case.cache, queries.transpose(1, 2), metadata, None, out),
        (case.cache, queries, metadata, None, out.t()),
        (case.cache, queries, metadata, None, out[1:]),
    ):
        with pytest.raises(InvariantError):
            attention.attend(*wrong)
    for dtype, heads in ((torch.float16, 4), (torch.float32, 3)):
        shape = CpuAttentionShape(num_heads=heads, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
        with pytest.raises(ConfigError):
            PagedAttention(library, shape, num_threads=1)


def test_cpu_attention_plan_covers_every_row_once(library):
    rng = random.Random(8)
    for _ in range(30):
        case = random_case(rng, rng.choice([torch.float32, torch.bfloat16]))
        threads = rng.choice([1, 2, 8])
        attention = PagedAttention(library, case.shape, num_threads=threads, deterministic=rng.random() < 0.5)
        metadata = attention.plan(case.inputs)
        covered = [np.zeros(count, dtype=int) for count in case.inputs.counts]
        for sequence, first, rows in metadata.arrays[3]:
            covered[sequence][first : first + rows] += 1
        for sequence in range(metadata.num_singles):
            covered[sequence] += 1
        assert all((rows == 1).all() for rows in covered)


def test_attention_bench_yields_positive_figures(library):
    figures = AttentionBench(library, 1, max_cache_bytes=10**6).measure("few", [40], [8], rounds=1)
    assert min(figures.attend_s, figures.layer_s, figures.torch_s, figures.gb_per_s, figures.gflop_per_s) > 0
