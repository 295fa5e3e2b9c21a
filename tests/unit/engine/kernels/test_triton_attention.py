"""Paged prefill and flash decoding against plain torch: random shapes, ragged batches, quantised caches."""

import random

import numpy as np
import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, make_pages, make_tables, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.flash_decode import (
    DecodeCut,
    DecodeWorkspace,
    are_uneven,
    choose_launch,
    choose_splits,
    cut_by_length,
    flash_decode,
)
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

    def decode(self, cut, lengths=None, spare=0):
        """`spare`: room for more parts than there can be."""
        out = torch.full_like(self.queries, 77.0, memory_format=torch.contiguous_format)
        num_parts = cut.num_parts(len(out)) + spare
        workspace = DecodeWorkspace.allocate(num_parts, self.queries.shape[1], self.head_dim, "cpu")
        workspace.sums.fill_(float("nan"))
        workspace.stats.fill_(float("nan"))
        flash_decode(
            self.queries,
            self.layer,
            out,
            tables=self.tables,
            lengths=int32(self.lengths if lengths is None else lengths),
            window=self.window,
            cut=cut,
            workspace=workspace if cut.num_splits != 1 else None,
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
    even, uneven = case.rng.choice([1, 2, 3, 8]), case.rng.choice([1, 3, 8, 16])
    cuts = [DecodeCut(launch=launch, num_splits=case.rng.choice([1, 2, 4, 8]))]
    cuts += [DecodeCut(launch=launch, even_parts=even, uneven_parts=uneven)]
    for cut in cuts:
        case.check(case.decode(cut, spare=case.rng.choice([0, 2])))


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


@pytest.mark.parametrize(
    "cut", [{"num_splits": 1}, {"num_splits": 4}, {"even_parts": 4, "uneven_parts": 8}, {"further_runs": 6}]
)
def test_triton_decode_padding_rows_are_zero(cut):
    """A CUDA graph's spare rows: length 0, with any query and any table."""
    case = Case(6, single=True)
    case.starts = case.starts[:1] * 3
    case.queries = torch.cat((case.queries[:1], torch.full_like(case.queries[:2], 9.0)))
    case.tables = torch.cat((case.tables[:1], torch.full_like(case.tables[:1], 2**30).expand(2, -1)))
    fixed_keys = 32 if "further_runs" in cut else 0
    launch = DecodeLaunch(block_n=16, num_warps=4, num_stages=2, min_keys=16, fixed_keys=fixed_keys)
    out = case.decode(DecodeCut(launch=launch, **cut), lengths=[case.lengths[0], 0, 0])
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
        queries[2:],
        layer,
        last,
        tables=tables,
        lengths=int32([21]),
        window=None,
        cut=DecodeCut(launch=launch, num_splits=1),
        workspace=None,
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
                runs = (case.lengths[sequence] - 1) // 32
                cut = DecodeCut(launch=decode, further_runs=runs + spare)
                one = case.decode(cut, lengths=[case.lengths[sequence]])
                assert torch.equal(one[0], whole[begin + count - 1])
            case.queries = queries
        case.tables = tables
        begin += count


def parts_of(lengths, *, window=None, fixed_keys=0, **cut):
    """The number of keys of every part into which `flash_decode` cuts sequences, read from its sums of ones."""
    launch = DecodeLaunch(block_n=16, num_warps=4, num_stages=2, min_keys=16, fixed_keys=fixed_keys)
    cut = DecodeCut(launch=launch, **cut)
    num_blocks = sum(-(-length // 16) for length in lengths) + 1
    workspace = DecodeWorkspace.allocate(cut.num_parts(len(lengths)), 1, 16, "cpu")
    workspace.stats.zero_()
    flash_decode(
        torch.zeros(len(lengths), 1, 16),
        LayerPages(pages=torch.zeros(num_blocks, 2, 1, 16, 16)),
        torch.zeros(len(lengths), 1, 16),
        tables=make_tables(random.Random(1), lengths, 16, num_blocks),
        lengths=int32(lengths),
        window=window,
        cut=cut,
        workspace=workspace,
    )
    return [int(weight) for weight in workspace.stats[:, 0, 1] if weight]


def test_triton_decode_cuts_every_sequence_alike():
    assert parts_of([256, 100], num_splits=4) == [64] * 4 + [32, 32, 32, 4]
    assert parts_of([64, 20], num_splits=16) == [16] * 4 + [16, 4], "parts have at least 16 keys"


def test_triton_decode_cuts_about_equal_sequences_into_even_parts():
    eight = {"even_parts": 8, "uneven_parts": 16}
    assert parts_of([256], **eight) == [32] * 8
    assert parts_of([64], **eight) == [16] * 4, "parts have at least 16 keys"
    assert parts_of([128] * 4, **eight) == [64] * 8
    assert parts_of([128] * 5, **eight) == [], "five times two would be more than eight"
    assert parts_of([128] * 8 + [0] * 4, **eight) == []


def test_triton_decode_cuts_the_long_one_of_many_short_ones():
    sixteen = {"even_parts": 8, "uneven_parts": 16}
    assert parts_of([32] * 7 + [800], **sixteen) == [80] * 10, "12 of the 16 shares of 1,024 keys, in whole tiles"
    assert parts_of([32] * 7 + [800], even_parts=8, uneven_parts=8) == [144] * 5 + [80]
    assert parts_of([64, 0, 400, 0, 0], **sixteen) == [32, 32] + [32] * 12 + [16]
    assert parts_of([800] + [32] * 7, window=40, **sixteen) == [], "in view all are as long"


def test_triton_decode_cuts_at_fixed_positions_in_deterministic_mode():
    assert parts_of([70, 32, 33], fixed_keys=32, further_runs=3) == [32, 32, 6, 32, 1]
    assert parts_of([100], window=20, fixed_keys=32, further_runs=3) == [16, 4]


def test_triton_decode_refuses_a_workspace_without_room():
    case = Case(6, single=True)
    launch = DecodeLaunch(block_n=16, num_warps=4, num_stages=2)
    for cut in ({"num_splits": 4}, {"even_parts": 2, "uneven_parts": 3}):
        with pytest.raises(ValueError, match="need room for"):
            case.decode(DecodeCut(launch=launch, **cut), spare=-1)


def test_sequences_are_uneven_when_one_is_half_longer_than_the_mean():
    def uneven(*lengths):
        return are_uneven(np.array(lengths, dtype=np.int32))

    assert uneven(1024, 1024, 1024, 4096)
    assert not uneven(1024, 1024, 1024, 1500)
    assert not uneven(10, 20, 400), "short ones are over soon"
    assert not uneven(8192)
    assert not uneven()


def test_choose_splits_fills_the_machine():
    launch = DecodeLaunch(block_n=64, num_warps=4, num_stages=3, min_keys=128)

    def splits(batch, max_length):
        return choose_splits(batch=batch, num_kv_heads=8, max_length=max_length, num_sms=132, launch=launch)

    assert splits(1, 8192) == 32  # 2 * 132 programs over 8 heads
    assert splits(1, 512) == 4
    assert splits(64, 8192) == 1
    assert splits(1, 1) == 1
    assert splits(4, 8192) == 8


def test_cut_by_length_shares_out_programs_of_all_multiprocessors():
    launch = DecodeLaunch(block_n=64, num_warps=4, num_stages=3, programs_per_sm=1, uneven_programs_per_sm=4)
    cut = cut_by_length(launch, num_kv_heads=8, num_sms=132)
    assert (cut.even_parts, cut.uneven_parts, cut.num_parts(10)) == (16, 66, 76)
    assert cut_by_length(launch, num_kv_heads=256, num_sms=132).even_parts == 1


def test_choose_launch_takes_the_first_for_so_many_programs():
    deep = DecodeLaunch(block_n=128, num_warps=4, num_stages=5, programs_per_sm=1)
    shared = DecodeLaunch(block_n=128, num_warps=8, num_stages=3)
    small = DecodeLaunch(block_n=64, num_warps=2, num_stages=3)

    def chosen(batch, num_kv_heads=8):
        return choose_launch((deep, shared, small), batch=batch, num_kv_heads=num_kv_heads, num_sms=132)

    assert chosen(1) == deep
    assert chosen(16) == deep, "128 programs for 132 multiprocessors"
    assert chosen(17) == shared
    assert chosen(33) == shared
    assert chosen(34) == small
    assert chosen(33, num_kv_heads=1) == deep
    assert chosen(4096) == small


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
