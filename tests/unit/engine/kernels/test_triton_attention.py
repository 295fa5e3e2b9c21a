"""Paged prefill and flash decoding against plain torch: random shapes, ragged batches, quantised caches."""

import random

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, make_pages, make_tables, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.flash_decode import DecodeWorkspace, choose_launch, choose_splits, flash_decode
from engine.kernels.triton.paged_prefill import paged_prefill, row_starts_of
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.tuning import DecodeLaunch, PrefillLaunch
from tandem.errors import ConfigError

__all__ = ["interpreted"]

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
CACHES = ("same", "same", "int8", "fp8")
EIGHT_BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """A random cache and batch; seeds cycle through group sizes, head sizes, caches and dtypes together."""

    def __init__(self, seed, *, single):
        rng = self.rng = random.Random(seed)
        self.dtype = (torch.float32, torch.float16)[seed % 2]
        self.group, self.head_dim = GROUPS[seed % len(GROUPS)], HEAD_DIMS[seed % len(HEAD_DIMS)]
        self.num_kv_heads = rng.choice([1, 2, 3])
        self.block_size = rng.choice([4, 16])
        self.window = rng.choice([None, None, 1, 7, 20, 40])
        # Some have both, as Gemma 2 has.
        self.scoring = {"scale": 0.3, "soft_cap": 1.5} if seed % 5 == 2 else {}
        # Of many heads to a group few tokens fill several tiles; the interpreter's time goes by tiles.
        several = [0, 1, 2, 9, 17, 33][: 4 if self.group > 4 else 5 if self.group > 1 else 6]
        self.counts = [1] * rng.randint(1, 4) if single else [rng.choice(several) for _ in range(4)]
        self.starts = [rng.choice([0, 0, 1, 14, 15, 16, 30, 31, 50, 75]) for _ in self.counts]
        self.lengths = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        num_blocks = sum(-(-length // self.block_size) for length in self.lengths) + 3
        self.layer = make_pages(
            rng,
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            dtype=EIGHT_BIT.get(rng.choice(CACHES), self.dtype),
        )
        self.tables = make_tables(rng, self.lengths, self.block_size, num_blocks)
        heads = self.num_kv_heads * (self.group + 2)  # a row as it lies in the projection, keys and values behind it
        rows = randn(rng, sum(self.counts), heads, self.head_dim, dtype=self.dtype)
        self.queries = rows[:, : self.num_kv_heads * self.group]

    def expected(self):
        return reference.attention(
            self.queries,
            self.layer,
            tables=self.tables,
            starts=int32(self.starts),
            counts=int32(self.counts),
            window=self.window,
            **self.scoring,
        )

    def prefill(self, launch, rows=slice(None), starts=None, counts=None):
        queries = self.queries[rows]
        out = torch.full_like(queries, 77.0, memory_format=torch.contiguous_format)
        paged_prefill(
            queries,
            self.layer,
            out,
            tables=self.tables,
            row_starts=row_starts_of(int32(self.counts if counts is None else counts)),
            starts=int32(self.starts if starts is None else starts),
            window=self.window,
            launch=launch,
            **self.scoring,
        )
        return out

    def decode(self, launch, splits, lengths=None):
        out = torch.full_like(self.queries, 77.0, memory_format=torch.contiguous_format)
        workspace = None
        if splits > 1:
            workspace = DecodeWorkspace.allocate(len(out) + 1, self.queries.shape[1], splits, self.head_dim, "cpu")
            workspace.sums.fill_(float("nan"))
            workspace.stats.fill_(float("nan"))
        flash_decode(
            self.queries,
            self.layer,
            out,
            tables=self.tables,
            lengths=int32(self.lengths if lengths is None else lengths),
            window=self.window,
            workspace=workspace,
            launch=launch,
            **self.scoring,
        )
        return out

    def check(self, out):
        torch.testing.assert_close(out.float(), self.expected(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


def prefill_case(seed):
    case = Case(seed, single=False)
    block_m, block_n = case.rng.choice([(16, 16), (32, 16), (64, 32)])
    case.check(case.prefill(PrefillLaunch(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)))


def decode_case(seed):
    case = Case(seed, single=True)
    launch = DecodeLaunch(block_n=case.rng.choice([16, 32]), num_warps=4, num_stages=2, min_keys=16)
    case.check(case.decode(launch, case.rng.choice([1, 2, 3, 8])))


@pytest.mark.parametrize("seed", range(24))
def test_triton_prefill_equals_reference(seed):
    prefill_case(seed)


@pytest.mark.parametrize("seed", range(24))
def test_triton_decode_equals_reference(seed):
    decode_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_triton_attention_random_shapes_match_reference(seed):
    prefill_case(seed)
    decode_case(seed)


def test_triton_prefill_leaves_rows_without_sequence_untouched():
    case = Case(4, single=False)
    case.queries = torch.cat((case.queries, torch.full_like(case.queries[:3], float("nan"))))
    out = case.prefill(PrefillLaunch(block_m=16, block_n=16, num_warps=4, num_stages=2))
    assert (out[-3:] == 77.0).all()
    case.queries = case.queries[:-3]
    case.check(out[:-3])


@pytest.mark.parametrize("num_before", [1, 7, 40])
def test_triton_prefill_leaves_rows_before_the_first_sequence_untouched(num_before):
    """Rows of sequences that decode, and sequences without rows behind the last."""
    case = Case(4, single=False)
    before = torch.full((num_before, *case.queries.shape[1:]), float("nan"), dtype=case.dtype)
    queries = torch.cat((before, case.queries))
    out = torch.full_like(queries, 77.0)
    paged_prefill(
        queries,
        case.layer,
        out,
        tables=torch.cat((case.tables, torch.full_like(case.tables[:1], 2**30).expand(5, -1))),
        row_starts=num_before + row_starts_of(int32([*case.counts, *[0] * 5])),
        starts=int32([*case.starts, *[0] * 5]),
        window=case.window,
        launch=PrefillLaunch(block_m=16, block_n=16, num_warps=4, num_stages=2),
        **case.scoring,
    )
    assert (out[:num_before] == 77.0).all()
    case.check(out[num_before:])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fixed_keys", [0, 32])
def test_triton_decode_padding_rows_are_zero(splits, fixed_keys):
    """A CUDA graph's spare rows: length 0, with any query and any table."""
    case = Case(6, single=True)
    case.starts = case.starts[:1] * 3
    case.queries = torch.cat((case.queries[:1], torch.full_like(case.queries[:2], 9.0)))
    case.tables = torch.cat((case.tables[:1], torch.full_like(case.tables[:1], 2**30).expand(2, -1)))
    launch = DecodeLaunch(block_n=16, num_warps=4, num_stages=2, min_keys=16, fixed_keys=fixed_keys)
    out = case.decode(launch, splits, lengths=[case.lengths[0], 0, 0])
    assert (out[1:] == 0.0).all()
    assert out[0].isfinite().all()


def layer_beyond_4g_elements():
    """Two blocks beyond 2^32 elements of reserved memory, of which only the used pages are touched."""
    head_dim, block_size, block = 128, 16, 2**20
    pages = torch.empty(block + 2, 2, 1, block_size, head_dim, dtype=torch.float16)
    assert block * pages.stride(0) >= 2**32
    pages[block : block + 2] = randn(random.Random(1), 2, 2, 1, block_size, head_dim, dtype=torch.float16)
    return LayerPages(pages=pages), int32([[block + 1, block]])


def test_triton_attention_large_offsets_do_not_wrap():
    layer, tables = layer_beyond_4g_elements()
    queries = randn(random.Random(2), 3, 2, layer.head_dim, dtype=torch.float16)
    expected = reference.attention(queries, layer, tables=tables, starts=int32([18]), counts=int32([3]), window=None)
    out = torch.empty_like(queries)
    prefill = PrefillLaunch(block_m=16, block_n=16, num_warps=4, num_stages=2)
    row_starts, starts = row_starts_of(int32([3])), int32([18])
    paged_prefill(queries, layer, out, tables=tables, row_starts=row_starts, starts=starts, window=None, launch=prefill)
    torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=4e-3)
    launch, last = DecodeLaunch(block_n=16, num_warps=4, num_stages=2), out[2:].zero_()
    flash_decode(
        queries[2:], layer, last, tables=tables, lengths=int32([21]), window=None, workspace=None, launch=launch
    )
    torch.testing.assert_close(last.float(), expected[2:], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("seed", range(8))
def test_triton_fixed_keys_are_bitwise_equal_in_any_chunks(seed):
    """Decode equals prefill, whole or in chunks, alone or batched, bit for bit."""
    case = Case(2 * seed, single=False)  # float32
    launch = PrefillLaunch(block_m=64, block_n=16, num_warps=4, num_stages=2, fixed_keys=32)
    whole = case.prefill(launch)
    begin = 0
    for sequence, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        tables, first = case.tables, case.rng.randint(0, count)
        case.tables = tables[sequence : sequence + 1]
        for offset, size in ((0, first), (first, count - first)):
            rows = slice(begin + offset, begin + offset + size)
            assert torch.equal(case.prefill(launch, rows, [start + offset], [size]), whole[rows])
        if count:
            decode = DecodeLaunch(block_m=64, block_n=16, num_warps=4, num_stages=2, fixed_keys=32)
            queries, case.queries = case.queries, case.queries[begin + count - 1 : begin + count]
            for spare in (0, 3):
                splits = choose_splits(
                    batch=1, num_kv_heads=1, max_length=case.lengths[sequence] + 32 * spare, num_sms=1, launch=decode
                )
                one = case.decode(decode, splits, lengths=[case.lengths[sequence]])
                assert torch.equal(one[0], whole[begin + count - 1])
            case.queries = queries
        case.tables = tables
        begin += count


def test_choose_splits_fills_the_machine():
    launch = DecodeLaunch(block_n=64, num_warps=4, num_stages=3, min_keys=128)

    def splits(batch, max_length, fixed_keys=0):
        chosen = (
            launch if not fixed_keys else DecodeLaunch(block_n=64, num_warps=4, num_stages=3, fixed_keys=fixed_keys)
        )
        return choose_splits(batch=batch, num_kv_heads=8, max_length=max_length, num_sms=132, launch=chosen)

    assert splits(1, 8192) == 32  # 2 * 132 programs over 8 heads
    assert splits(1, 512) == 4
    assert splits(64, 8192) == 1
    assert splits(1, 1) == 1
    assert splits(4, 8192) == 8
    assert splits(64, 8192, fixed_keys=512) == 16
    assert splits(1, 8193, fixed_keys=512) == 32


def test_choose_launch_takes_the_first_for_so_many_programs():
    deep = DecodeLaunch(block_n=128, num_warps=4, num_stages=5, programs_per_sm=1)
    shared = DecodeLaunch(block_n=128, num_warps=8, num_stages=3)
    small = DecodeLaunch(block_n=64, num_warps=2, num_stages=3)

    def chosen(batch, num_kv_heads=8):
        launches = (deep, shared, small)
        launch = choose_launch(launches, batch=batch, num_kv_heads=num_kv_heads, num_sms=132)
        parts = choose_splits(batch=batch, num_kv_heads=num_kv_heads, max_length=8192, num_sms=132, launch=launch)
        return launch, parts

    assert chosen(1) == (deep, 16)
    assert chosen(16) == (deep, 1), "128 programs for 132 multiprocessors"
    assert chosen(17) == (shared, 1)
    assert chosen(33) == (shared, 1)
    assert chosen(34) == (small, 1)
    assert chosen(33, num_kv_heads=1) == (deep, 4)
    assert chosen(4096) == (small, 1)


def test_triton_attention_mismatched_scales_are_refused():
    pages = torch.zeros(2, 2, 1, 4, 8)
    by_token, by_head = torch.zeros(2, 2, 1, 4), torch.zeros(2, 1)
    for dtype, scales in (
        (torch.float32, {"token_scales": by_token}),
        (torch.int8, {}),
        (torch.int8, {"head_scales": by_head}),
        (torch.float8_e4m3fn, {"token_scales": by_token}),
        (torch.float8_e4m3fn, {"token_scales": by_token, "head_scales": by_head}),
    ):
        with pytest.raises(ConfigError, match=r"int8 has them by token, fp8_e4m3 by head"):
            LayerPages(pages=pages.to(dtype), **scales)
    with pytest.raises(ConfigError, match="one per token and head"):
        LayerPages(pages=pages.to(torch.int8), token_scales=torch.zeros(2, 2, 1))
    with pytest.raises(ConfigError, match="one per key-value head of K and of V"):
        LayerPages(pages=pages.to(torch.float8_e4m3fn), head_scales=torch.zeros(2))
    with pytest.raises(ConfigError, match="contiguous"):
        LayerPages(pages=pages.transpose(3, 4))
