"""Compiled attention over a cache in codes against float64 over the same codes, and the fused write against torch."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels.cpu.attention import CpuAttentionShape
from engine.kernels.cpu.attention_codes import CODE_DTYPES, CodedLayer, PagedCodeAttention
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import CpuFeatures, load_kernels
from engine.kernels.cpu.measure_attention import step_over
from engine.kv_storage.kv_codes import group_codes, restored, token_codes
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.norm import HeadNorm
from engine.model.layers.rope import rotate_
from tandem.errors import ConfigError, InvariantError
from tandem.values.kv_layout import KVLayout

HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
ENCODE = {"int8": token_codes, "int4": group_codes}
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1.5e-2, "rtol": 8e-3}}


@pytest.fixture(scope="module")
def library():
    return load_kernels()


@pytest.fixture(params=["this processor", "no AVX512"])
def limited(request, library):
    """The library on processors with fewer features."""
    seen = copy.copy(library)
    if request.param == "no AVX512":
        seen.features = CpuFeatures.from_bits(1)
    return seen


def coded_layer(code_dtype, num_blocks, num_kv_heads, block_size, head_dim):
    layout = KVLayout(
        model_fingerprint="",
        dtype=code_dtype,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    cache = PagedKVCache(layout, num_blocks=num_blocks)
    return cache.layer(0), cache.layer_scales(0)


class Case:
    """A random step over shuffled blocks."""

    def __init__(self, seed, dtype, code_dtype="int8", **fixed):
        rng = random.Random(seed)
        num_seqs, num_kv_heads = rng.randint(1, 5), rng.choice([1, 2, 3])
        group = fixed.pop("group", rng.choice(GROUPS))
        self.shape = CpuAttentionShape(
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=fixed.pop("head_dim", HEAD_DIMS[seed % len(HEAD_DIMS)]),
            block_size=rng.choice([16, 16, 32, 4]),
            dtype=dtype,
        )
        self.window = rng.choice([None, None, 1, 3, 16, 70, 256])
        starts = fixed.pop("starts", [rng.choice([0, 0, 1, 15, 16, 63, 64, 130, 515]) for _ in range(num_seqs)])
        counts = fixed.pop("counts", [rng.choice([1, 1, 1, 2, 17, 33, 90]) for _ in starts])
        size, s = self.shape.block_size, self.shape
        num_blocks = sum(-(-(a + b) // size) for a, b in zip(starts, counts, strict=True)) + 3
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(num_blocks, generator=generator).numpy()
        self.inputs = step_over(starts, counts, size, blocks[:-1], spare=int(blocks[-1]))
        self.code_dtype = code_dtype
        self.codes, self.scales = coded_layer(code_dtype, num_blocks, s.num_kv_heads, size, s.head_dim)
        values = torch.randn(num_blocks, 2, s.num_kv_heads, size, s.head_dim, generator=generator)
        codes, scales = ENCODE[code_dtype](values * torch.logspace(-0.5, 0.3, s.num_kv_heads)[:, None, None])
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        rows = int(self.inputs.counts.sum())
        self.qkv = torch.randn(rows, s.num_heads + 2 * s.num_kv_heads, s.head_dim, generator=generator).to(dtype)

    def attend(self, library, *, threads=2, deterministic=False, max_blocks=None):
        windows = (None, self.window)
        attention = PagedCodeAttention(
            library, self.shape, self.code_dtype, windows=windows, num_threads=threads, deterministic=deterministic
        )
        if max_blocks is not None:
            attention._max_blocks = max_blocks
        out = torch.full((len(self.qkv), self.shape.num_heads * self.shape.head_dim), math.nan).to(self.shape.dtype)
        layer = CodedLayer(self.codes, self.scales)
        plan = attention.plan(self.inputs)
        attention.attend(layer, self.qkv[:, : self.shape.num_heads], plan, self.window, out)
        return out

    def expected(self, deterministic):
        """Rows that are not answered in place attend to keys and values rounded to the model's dtype."""
        out, row, size = [], 0, self.shape.block_size
        for i, (start, count) in enumerate(zip(self.inputs.starts, self.inputs.counts, strict=True)):
            blocks = torch.from_numpy(self.inputs.tables[i, : -(-int(start + count) // size)])
            dtype = torch.float32 if count == 1 and not deterministic else self.shape.dtype
            values = restored(self.codes[blocks], self.scales[blocks], dtype).double()
            keys, values = values.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : int(start + count)]
            group = self.shape.group_size
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
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

    def check(self, library, *, deterministic=False, **options):
        ours = self.attend(library, deterministic=deterministic, **options).double()
        tolerance = TOLERANCE[self.shape.dtype]
        if self.code_dtype == "int4":
            # Sums of codes that are all positive, less those of their minima: two bits of a float cancel.
            tolerance = {name: max(bound, 4e-5) for name, bound in tolerance.items()}
        torch.testing.assert_close(ours, self.expected(deterministic), **tolerance)


@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(16))
def test_cpu_code_attention_random_steps_equal_float64(limited, dtype, seed, code_dtype):
    case = Case(seed, dtype, code_dtype)
    case.check(limited, threads=1 + seed % 2, deterministic=seed % 3 == 0, max_blocks=9 if seed % 2 else None)


@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_cpu_code_attention_every_group_size_decodes_in_parts(library, dtype, group, code_dtype):
    Case(group, dtype, code_dtype, group=group, starts=[1300, 700, 64, 3, 0], counts=[1] * 5).check(library)


@pytest.mark.slow
@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(100, 260))
def test_cpu_code_attention_random_steps_match_reference(library, dtype, seed, code_dtype):
    Case(seed, dtype, code_dtype).check(library, threads=1 + seed % 2, deterministic=seed % 3 == 0)


@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_code_attention_deterministic_row_is_independent_of_batch(library, dtype, code_dtype):
    whole = Case(3, dtype, code_dtype, starts=[30, 0], counts=[50, 40])
    expected = whole.attend(library, deterministic=True)
    first = 0
    for i, count in enumerate(whole.inputs.counts.tolist()):
        for row in (0, count // 2, count - 1):
            part = copy.copy(whole)
            start = int(whole.inputs.starts[i]) + row
            part.inputs = replace(
                whole.inputs,
                token_ids=np.zeros(1, dtype=np.int64),
                positions=np.array([start]),
                slots=whole.inputs.slots[first + row : first + row + 1],
                tables=whole.inputs.tables[i : i + 1],
                starts=np.array([start]),
                counts=np.array([1]),
                num_single=1,
            )
            part.qkv = whole.qkv[first + row : first + row + 1]
            assert torch.equal(part.attend(library, deterministic=True)[0], expected[first + row])
        first += count


def test_cpu_code_attention_restores_one_long_sequence_at_a_time(library):
    case = Case(5, torch.float32, starts=[0, 200, 0], counts=[300, 20, 40])
    attention = PagedCodeAttention(library, case.shape, "int8", windows=(None,), num_threads=1)
    attention._max_blocks = 1
    groups = attention.plan(case.inputs).restored[None]
    assert [group.end_row - group.first_row for group in groups] == case.inputs.counts.tolist()
    case.check(library, max_blocks=1)


def unpacked(codes):
    return torch.stack((codes & 15, codes >> 4), -1).int() if codes.dtype is torch.uint8 else codes.int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 40, 64, 96, 128])
def test_cpu_int4_blocks_are_restored_to_the_bit(library, dtype, head_dim):
    case = Case(2, dtype, "int4", head_dim=head_dim, starts=[0], counts=[150])
    attention = PagedCodeAttention(library, case.shape, "int4", windows=(None,), num_threads=2)
    blocks = attention.plan(case.inputs).restored[None][0].blocks
    found = attention._restored(CodedLayer(case.codes, case.scales), blocks)
    assert torch.equal(found, restored(case.codes[blocks], case.scales[blocks], dtype))


@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "has_norm"), [(64, True), (80, False), (40, True), (6, False), (128, False)])
def test_cpu_code_write_codes_match_torch(library, dtype, head_dim, has_norm, code_dtype):
    torch.manual_seed(head_dim)
    rows, heads, kv_heads, size = 37, 4, 2, 16
    shape = CpuAttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=size, dtype=dtype)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
    qkv[3, heads:] = 0.0
    qkv[4, heads + kv_heads, 1], qkv[5, -1, 0] = math.inf, math.nan
    angles = torch.randn(rows, head_dim // 2) * 9
    slots = torch.randperm(4 * size)[:rows]
    norm = HeadNorm(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-6) if has_norm else None
    expected = qkv.to(torch.float32, copy=True)
    if norm is not None:
        wide = HeadNorm(norm.query.float(), norm.key.float(), norm.eps)
        wide.apply_(expected[:, :heads], expected[:, heads : heads + kv_heads])
    cos, sin = angles.cos(), angles.sin()
    rotate_(expected[:, : heads + kv_heads], torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None])
    fresh = expected[:, heads:].view(rows, 2, kv_heads, head_dim).nan_to_num(0.0, 0.0, 0.0)
    codes, scales = coded_layer(code_dtype, 4, kv_heads, size, head_dim)
    ops = CpuElementwise(library, dtype, num_threads=2)
    weight = None if norm is None else torch.cat((norm.query.expand(heads, -1), norm.key.expand(kv_heads, -1)))
    plan = ops.plan_rotation(shape, cos, sin, slots.numpy())
    ops.qk_norm_rope_encode(plan, qkv, CodedLayer(codes, scales), weight, 1e-6)
    where = (slots // size, slice(None), slice(None), slots % size)
    wanted, wanted_scales = ENCODE[code_dtype](fresh)
    # A value within rounding of the middle between two codes, or of two numbers in bfloat16, may become either.
    torch.testing.assert_close(scales[where], wanted_scales, atol=1e-9, rtol=1e-5 if code_dtype == "int8" else 8e-3)
    apart = (unpacked(codes[where]) - unpacked(wanted)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 2e-3
    assert not codes[where][3].any()
    untouched = torch.ones(4 * size, dtype=torch.bool).index_fill(0, slots, False).nonzero()[:, 0]
    assert not codes[untouched // size, :, :, untouched % size].any()


def test_cpu_code_attention_unsupported_shape_is_refused(library):
    case = Case(1, torch.float32)
    with pytest.raises(ConfigError, match=r"not torch\.float16"):
        PagedCodeAttention(library, replace(case.shape, dtype=torch.float16), "int8", windows=(None,), num_threads=1)
    with pytest.raises(InvariantError, match="cache in codes"):
        CodedLayer(case.codes, case.scales[..., :1])
    with pytest.raises(InvariantError, match="cache in codes"):
        CodedLayer(case.codes.float(), case.scales)
    attention = PagedCodeAttention(library, case.shape, "int8", windows=(None,), num_threads=1)
    out = torch.empty(len(case.qkv), 1)
    layer, plan = CodedLayer(case.codes, case.scales), attention.plan(case.inputs)
    with pytest.raises(InvariantError, match="attention of"):
        attention.attend(layer, case.qkv[:, : case.shape.num_heads], plan, None, out)
    other, out = Case(1, torch.float32, "int4"), torch.empty(len(case.qkv), case.shape.num_heads * case.shape.head_dim)
    with pytest.raises(InvariantError, match="int4 codes"):
        attention.attend(
            CodedLayer(other.codes, other.scales), case.qkv[:, : case.shape.num_heads], plan, case.window, out
        )
