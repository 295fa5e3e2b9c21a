"""Packed projections against torch in double precision; a row alone against the same row in any batch, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from engine.kernels.cpu import build
from engine.kernels.cpu.gemm import (
    Arithmetic,
    Epilogue,
    PackedLinear,
    best_arithmetic,
    stored_arithmetic,
    supports,
)
from engine.kernels.cpu.library import CpuFeatures, KernelLibrary
from engine.kernels.cpu.measure import REFERENCE_SHAPES, ProjectionShape, measure_ceilings, measure_projection
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import (
    DenseMatrix,
    Fp8Matrix,
    GroupIntMatrix,
    Int8Matrix,
    Table16Matrix,
    stack,
)
from tests.support.engine.paged_harness import needs

ROWS = (1, 2, 5, 12, 13, 16, 17, 32, 33, 48, 300)
SHAPES = ((64, 96), (100, 70), (32, 1000), (200, 1100), (34, 65), (96, 2100))
FLOATS = tuple(one for one in Arithmetic if one.is_of_floats)
ALL = tuple(one for one in Arithmetic if one not in FLOATS and (not one.has_groups or one is Arithmetic.INT4))
EIGHT_BITS = tuple(arithmetic for arithmetic in Arithmetic if arithmetic.has_column_scales)
QUANTIZED = (*EIGHT_BITS, Arithmetic.INT4)
WHOLE = tuple(arithmetic for arithmetic in ALL if arithmetic not in QUANTIZED)
GROUPED = tuple(one for one in Arithmetic if one.has_groups)
HALVES = (Arithmetic.INT8_HALVES, Arithmetic.INT8_OFFSET_HALVES)
GROUP = 32


def pack(library, arithmetic, weight, bias=None, epilogue=Epilogue.STORE, num_threads=2):
    return PackedLinear(library, weight, bias, arithmetic=arithmetic, epilogue=epilogue, num_threads=num_threads)


def quantized(values):
    """Rows in units of their largest magnitude over 127, as numbers of the original scale."""
    scale = values.double().abs().amax(dim=1, keepdim=True) / 127
    return (values.double() / scale).round() * scale


def in_groups(values):
    """`[rows, groups, 32]` in double, the last group filled with zeros."""
    return F.pad(values.double(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def grouped_rows(x):
    """Rows in units of each group's largest magnitude over 127, which are found in float, as numbers."""
    groups = in_groups(x).float()
    scale = (groups.abs().amax(dim=2, keepdim=True) / 127).clamp_min(1e-32)
    return ((groups * (1 / scale)).round().double() * scale).flatten(1)[:, : x.shape[1]]


def four_bit_candidates(weight):
    """Each group in four bits by each scale that is tried, as numbers, and its squared error; `[scales, rows, groups]`.

    Double instead of float: the best two may change places where their errors are nearly the same.
    """
    groups = in_groups(weight)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = torch.stack([(extreme / -n).half().double() for n in torch.arange(9.0, 5.9, -0.25)])
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    values = (groups * inverse).clamp(-8, 7).round() * scale
    return values, (values - groups).square().sum(dim=3)


def stored_int4(library, weight):
    """What a packed matrix multiplies by, from products with single ones."""
    linear = pack(library, Arithmetic.INT4, weight, epilogue=Epilogue.STORE_FLOAT32)
    out = torch.empty(weight.shape[1], weight.shape[0])
    linear(torch.eye(weight.shape[1]).bfloat16(), out)
    return out.T.double()


def expected(arithmetic, x, weight, bias, epilogue, old, library):
    if arithmetic is Arithmetic.INT4:
        x, weight = grouped_rows(x), stored_int4(library, weight)
    elif arithmetic in QUANTIZED:
        x, weight = quantized(x), quantized(weight)
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if epilogue is Epilogue.GATED:
        gate, value = product.chunk(2, dim=-1)
        return F.silu(gate) * value
    return product + old.double() if epilogue is Epilogue.ADD else product


def assert_near(result, reference, arithmetic, depth):
    dtype = result.dtype
    if arithmetic is Arithmetic.FLOAT32:
        tolerance = 2e-7 * depth**0.5
    else:
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-4
    if arithmetic in QUANTIZED:
        tolerance += 1e-2  # a half may round either way in float and in double
    assert (result.double() - reference).abs().max() <= tolerance * (1 + reference.abs().max())


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("arithmetic", ALL)
def test_cpu_gemm_products_equal_torch(library, arithmetic, epilogue):
    needs(arithmetic)
    generator = torch.Generator().manual_seed(7)
    dtype = arithmetic.dtype
    for index, (columns, depth) in enumerate(SHAPES):
        weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype) if index % 2 else None
        linear = pack(library, arithmetic, weight, bias, epilogue)
        for num_rows in ROWS:
            x = torch.randn(num_rows, depth, generator=generator).to(dtype)
            old = torch.randn(num_rows, linear.columns, generator=generator).to(linear.out_dtype)
            out = old.clone()
            linear(x, out)
            assert_near(out, expected(arithmetic, x, weight, bias, epilogue, old, library), arithmetic, depth)


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("arithmetic", ALL)
def test_cpu_gemm_row_is_independent_of_batch(library, arithmetic, epilogue):
    needs(arithmetic)
    dtype = arithmetic.dtype
    for columns, depth in ((160, 2112), (320, 544)):
        weight = (torch.randn(columns, depth) / depth**0.5).to(dtype)
        alone = pack(library, arithmetic, weight, epilogue=epilogue, num_threads=1)
        together = pack(library, arithmetic, weight, epilogue=epilogue, num_threads=2)
        x = torch.randn(600, depth).to(dtype)
        old = torch.randn(600, alone.columns).to(alone.out_dtype)
        single = old.clone()
        for row in range(0, 600, 37):
            alone(x[row : row + 1], single[row : row + 1])
        for begin, end in ((0, 600), (0, 20), (30, 47), (0, 40), (100, 380), (555, 560)):
            out = old[begin:end].clone()
            together(x[begin:end], out)
            for row in range(0, 600, 37):
                if begin <= row < end:
                    assert torch.equal(out[row - begin], single[row]), (columns, depth, begin, end, row)


@pytest.mark.parametrize("arithmetic", ALL)
@settings(max_examples=40, deadline=None)
@given(
    columns=st.integers(1, 90),
    depth=st.integers(1, 300),
    num_rows=st.integers(0, 70),
    apart=st.integers(0, 9),
    threads=st.integers(1, 3),
)
def test_cpu_gemm_any_size_stays_in_bounds(library, arithmetic, columns, depth, num_rows, apart, threads):
    """Rows have gaps in memory, which are neither read nor written."""
    needs(arithmetic)
    dtype = arithmetic.dtype
    weight = torch.randn(columns, depth).to(dtype)
    linear = pack(library, arithmetic, weight, num_threads=threads)
    wide_x = torch.full((num_rows, depth + apart), float("nan")).to(dtype)
    wide_out = torch.full((num_rows + 1, columns + apart), 7.0).to(dtype)
    x = wide_x[:, :depth].copy_(torch.randn(num_rows, depth))
    out = wide_out[:num_rows, :columns]
    linear(x, out)
    if num_rows:
        assert_near(out, expected(arithmetic, x, weight, None, Epilogue.STORE, out, library), arithmetic, depth)
    assert (wide_out[:, columns:] == 7).all()
    assert (wide_out[num_rows] == 7).all()


@pytest.mark.parametrize("arithmetic", WHOLE)
def test_cpu_gemm_add_epilogue_equals_residual_sum(library, arithmetic):
    needs(arithmetic)
    dtype = arithmetic.dtype
    weight, x, residual = torch.randn(96, 64).to(dtype), torch.randn(40, 64).to(dtype), torch.randn(40, 96).to(dtype)
    product = torch.empty_like(residual)
    pack(library, arithmetic, weight)(x, product)
    added = residual.clone()
    pack(library, arithmetic, weight, epilogue=Epilogue.ADD)(x, added)
    assert torch.equal(added, residual + product)


@pytest.mark.parametrize("arithmetic", WHOLE)
def test_cpu_gemm_gate_saturates_for_extreme_inputs(library, arithmetic):
    needs(arithmetic)
    dtype = arithmetic.dtype
    gates = torch.tensor([-1e30, -200.0, -88.5, -20.0, -1.0, -0.0, 0.0, 1e-3, 3.0, 20.0, 90.0, 1e30])
    weight = torch.cat([gates[:, None], torch.ones(len(gates), 1)]).to(dtype)
    out = torch.empty(1, len(gates), dtype=dtype)
    pack(library, arithmetic, weight, epilogue=Epilogue.GATED)(torch.ones(1, 1, dtype=dtype), out)
    assert torch.allclose(out.double(), F.silu(gates.to(dtype).double()), rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("arithmetic", ALL)
@pytest.mark.parametrize("num_rows", [3, 40])
def test_cpu_gemm_nan_affects_its_row_only(library, arithmetic, num_rows):
    needs(arithmetic)
    dtype = arithmetic.dtype
    x = torch.randn(num_rows, 64).to(dtype)
    x[1, 9] = float("nan")
    out = torch.empty(num_rows, 40, dtype=dtype)
    pack(library, arithmetic, torch.randn(40, 64).to(dtype))(x, out)
    assert out[1].isnan().all()
    assert out[[row for row in range(num_rows) if row != 1]].isfinite().all()


@pytest.mark.parametrize("arithmetic", EIGHT_BITS)
@pytest.mark.parametrize("num_rows", [1, 7, 20, 70])
def test_cpu_gemm_int8_products_are_the_same_bits_everywhere(library, arithmetic, num_rows):
    """Sums are exact, and every kind of processor rounds as this reference does."""
    needs(arithmetic)
    generator = torch.Generator().manual_seed(num_rows)
    x = (torch.randn(num_rows, 1234, generator=generator) * torch.rand(num_rows, 1, generator=generator)).bfloat16()
    weight = (torch.randn(150, 1234, generator=generator) + 0.5).bfloat16()
    weight[7] = weight[8] = 1
    x[0] = -1  # and with them the largest sums
    row_scale = x.float().abs().amax(dim=1, keepdim=True) / 127
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    rows = (x.float() * (1 / row_scale)).round()
    columns = (weight.float() * torch.div(torch.full_like(largest, 127), largest)).round()
    sums = rows.double() @ columns.double().T
    product = sums.float() * row_scale * (largest / 127).T
    out = torch.empty(num_rows, 150)
    pack(library, arithmetic, weight, epilogue=Epilogue.STORE_FLOAT32)(x, out)
    assert torch.equal(out, product)
    stored = torch.ones(num_rows, 150).bfloat16()
    pack(library, arithmetic, weight, epilogue=Epilogue.ADD)(x, stored)
    assert torch.equal(stored, torch.ones(num_rows, 150).bfloat16() + product.bfloat16())


@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_cpu_gemm_int8_without_dot_products_gives_the_same_bits(library, epilogue):
    needs(Arithmetic.INT8_DOT)
    weight, bias = torch.randn(200, 333).bfloat16(), torch.randn(200).bfloat16()
    for num_rows in (1, 5, 30, 100):
        x = torch.randn(num_rows, 333).bfloat16()
        results = []
        for arithmetic in (Arithmetic.INT8_DOT, Arithmetic.INT8_VECTORS):
            linear = pack(library, arithmetic, weight, bias, epilogue)
            results.append(torch.ones(num_rows, linear.columns).to(linear.out_dtype))
            linear(x, results[-1])
        assert torch.equal(*results)


@pytest.mark.parametrize("depth", [64, 45, 300])
def test_cpu_gemm_int4_stores_what_loses_least(library, depth):
    weight = torch.randn(70, depth, generator=torch.Generator().manual_seed(depth)).bfloat16()
    weight[3, :40] = 0
    weight[4, 7] = 30.0
    values, errors = four_bit_candidates(weight)
    stored = in_groups(stored_int4(library, weight))
    matches = (stored - values).abs().amax(dim=3) <= 1e-6 * values.abs().amax(dim=(0, 3))
    assert matches.any(dim=0).all()  # every group is one of the candidates, and none loses more than the best
    lost = (stored - in_groups(weight)).square().sum(dim=2)
    assert (lost <= errors.amin(dim=0) * (1 + 1e-5) + 1e-12).all()
    nearest_max = errors[4].sum()  # by the largest value alone, which is -8
    assert lost.sum() < 0.95 * nearest_max


def stored_matrix(num_rows, num_columns, group_size, arithmetic, *, seed=3, scale_dtype=torch.float16):
    """Random codes and scales, and what else `arithmetic` has."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 if "int8" in arithmetic.value else 4
    shape = (num_rows, -(-num_columns // group_size))
    codes = torch.randint(0, 1 << bits, (num_rows, num_columns), generator=generator).to(torch.uint8)
    zero = torch.full(shape, 1 << (bits - 1))
    if arithmetic is Arithmetic.INT4_ZEROS:
        zero = torch.randint(0, 17, shape, generator=generator)
    has_offsets = "offset" in arithmetic.value
    offset = (-torch.rand(shape, generator=generator) * 0.2).half().float()
    if arithmetic in HALVES:
        # What is added is the same for both halves of a group, once the middle code is moved to zero.
        offset = offset[:, ::2].repeat_interleave(2, dim=1)[:, : shape[1]]
    return GroupIntMatrix(
        bits=bits,
        num_columns=num_columns,
        codes=codes if bits == 8 else pack_nibbles(codes),
        scale=(torch.rand(shape, generator=generator) * 0.32 / (1 << bits) + 1e-4).to(scale_dtype),
        zero=zero.to(torch.int16) * (0 if has_offsets and arithmetic not in HALVES else 1),
        group_size=group_size,
        offset=offset if has_offsets else None,
    )


def with_rounded_offsets(matrix):
    """The value of the middle code is kept in half precision."""
    if matrix.offset is None:
        return matrix
    middle = 1 << (matrix.bits - 1)
    of_middle = ((middle - matrix.zero) * matrix.scale.float() + matrix.offset).half().float()
    return replace(matrix, zero=torch.full_like(matrix.zero, middle), offset=of_middle)


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("arithmetic", GROUPED)
def test_cpu_gemm_stored_groups_multiply_by_the_restored_values(library, arithmetic, epilogue):
    needs(arithmetic)
    sizes = [(64, 96, 32, torch.float16), (100, 70, 64, torch.bfloat16), (32, 1000, 128, torch.float16)]
    sizes += [(34, 65, 65, torch.float32), (200, 1101, 2048, torch.float16)]
    if arithmetic in HALVES:
        sizes = [(rows, depth, 16, dtype) for rows, depth, _, dtype in sizes]
    for columns, depth, group_size, scale_dtype in sizes:
        matrix = stored_matrix(columns, depth, group_size, arithmetic, scale_dtype=scale_dtype)
        if scale_dtype is torch.float32:
            matrix = replace(matrix, scale=matrix.scale.half().float())
        assert stored_arithmetic(library.features, matrix) is arithmetic
        linear = pack(library, arithmetic, matrix, torch.randn(columns).bfloat16(), epilogue)
        plain = pack(library, arithmetic, matrix, epilogue=Epilogue.STORE_FLOAT32)
        for num_rows in ROWS:
            x = torch.randn(num_rows, depth).bfloat16()
            product = torch.empty(num_rows, columns)
            plain(x, product)
            reference = grouped_rows(x) @ with_rounded_offsets(matrix).dequantized().double().T
            # Everything but the last sums is exact: one rounding of each group's product, and one of its sum.
            assert (product - reference).abs().max() <= 3e-6 * (1 + reference.abs().max()) * depth**0.5
            together = torch.ones(num_rows, linear.columns).to(linear.out_dtype)
            linear(x, together)
            for row in range(0, num_rows, 7):
                alone = torch.ones(1, linear.columns).to(linear.out_dtype)
                linear(x[row : row + 1], alone)
                assert torch.equal(alone[0], together[row])


def test_cpu_gemm_stored_int4_parts_and_stacks_give_the_same_bits(library):
    matrix = stored_matrix(96, 256, 64, Arithmetic.INT4_ZEROS)
    x = torch.randn(9, 256).bfloat16()
    whole, parts = torch.empty(9, 96), torch.empty(9, 96)
    pack(library, Arithmetic.INT4_ZEROS, matrix, epilogue=Epilogue.STORE_FLOAT32)(x, whole)
    for begin in (0, 32, 64):
        some = pack(library, Arithmetic.INT4_ZEROS, matrix.rows(begin, begin + 32), epilogue=Epilogue.STORE_FLOAT32)
        some(x, parts[:, begin : begin + 32])
    assert torch.equal(whole, parts)
    coarse = stored_matrix(32, 256, 128, Arithmetic.INT4_ZEROS, seed=4)
    joined = stack([matrix, coarse])
    both = torch.empty(9, 128)
    pack(library, Arithmetic.INT4_ZEROS, joined, epilogue=Epilogue.STORE_FLOAT32)(x, both)
    assert torch.equal(both[:, :96], whole)


@pytest.mark.parametrize("arithmetic", EIGHT_BITS)
@pytest.mark.parametrize("gated", [False, True])
def test_cpu_gemm_stored_int8_is_packed_like_the_weights_it_was_made_of(library, arithmetic, gated):
    """Packing needs no instructions of its own, so that AMX's is compared everywhere."""
    if arithmetic is Arithmetic.INT8_DOT:
        needs(arithmetic)  # its packing is compiled with its kernel alone
    weight = torch.randn(102, 130).bfloat16()
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    codes = (weight.float() * torch.div(torch.full_like(largest, 127), largest)).round().to(torch.int8)
    scale = (largest / 127)[:, 0].contiguous()
    name, columns, panels = arithmetic.value, 51 if gated else 102, 4
    num_bytes = library.function(f"tandem_{name}_packed_bytes", "ii", "i")(panels, 130)
    packed, scales = torch.zeros(2, num_bytes, dtype=torch.uint8), torch.zeros(2, panels * 32)
    library.function(f"tandem_{name}_pack", "piiiippi")(
        weight.data_ptr(), 130, columns, 130, int(gated), packed[0].data_ptr(), scales[0].data_ptr(), 2
    )
    library.function(f"tandem_{name}_pack_stored", "ppiiippi")(
        codes.data_ptr(), scale.data_ptr(), columns, 130, int(gated), packed[1].data_ptr(), scales[1].data_ptr(), 2
    )
    assert torch.equal(*packed)
    assert torch.equal(*scales)


def test_cpu_gemm_stored_int8_multiplies_by_its_codes(library):
    needs(Arithmetic.INT8_VECTORS)
    matrix = Int8Matrix(
        codes=torch.randint(-128, 128, (40, 70), dtype=torch.int8), scale=torch.rand(40) + 0.1, rounds_inputs=True
    )
    x = torch.randn(7, 70).bfloat16()
    out = torch.empty(7, 40)
    arithmetic = stored_arithmetic(library.features, matrix)
    pack(library, arithmetic, matrix, epilogue=Epilogue.STORE_FLOAT32)(x, out)
    unit = x.float().abs().amax(dim=1, keepdim=True) / 127
    sums = (x.float() * (1 / unit)).round().double() @ matrix.codes.double().T
    assert torch.equal(out, sums.float() * unit * matrix.scale)


def float_codes(columns, depth, arithmetic):
    """A matrix of which `arithmetic` multiplies the codes, in several groups of the depth if that has several."""
    generator = torch.Generator().manual_seed(columns)
    if arithmetic in (Arithmetic.TABLE16, Arithmetic.TABLE16_FLOAT32):
        return WeightScheme.NF4.quantize(torch.randn(columns, depth, generator=generator))
    codes = torch.randint(0, 256, (columns, depth), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1  # no numbers; 1 is the least one, below the normal ones
    scale = torch.rand(-(-columns // 48), -(-depth // 128), generator=generator)
    return Fp8Matrix(codes=codes.view(torch.float8_e4m3fn), scale=scale, block_rows=48, block_columns=128)


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("arithmetic", FLOATS)
def test_cpu_gemm_codes_of_floats_multiply_as_their_values_do(library, arithmetic, epilogue):
    for columns, depth in SHAPES:
        matrix = float_codes(columns, depth, arithmetic)
        assert stored_arithmetic(library.features, matrix, arithmetic.dtype) is arithmetic
        bias = torch.randn(columns)
        linear = pack(library, arithmetic, matrix, bias, epilogue)
        values = pack(library, Arithmetic.FLOAT32, matrix.dequantized(), bias, epilogue)
        for num_rows in ROWS:
            x = torch.randn(num_rows, depth).to(arithmetic.dtype)
            found = torch.ones(num_rows, linear.columns).to(linear.out_dtype)
            expected = torch.zeros(num_rows, linear.columns)
            linear(x, found)
            values(x.float(), expected)
            if epilogue is Epilogue.ADD:  # the product is rounded first
                expected = 1.0 + expected.to(linear.out_dtype).float()
            same = torch.equal(without_subnormals(found), without_subnormals(expected.to(linear.out_dtype)))
            assert same, (columns, depth, num_rows)


def without_subnormals(values):
    """AVX512_BF16 rounds numbers below the least normal one to zero, torch does not: gates of about -88 make some."""
    return values.where(values.abs() >= torch.finfo(values.dtype).tiny, 0.0)


def test_cpu_gemm_gate_below_the_least_normal_number_is_zero_or_rounded(library):
    needs(Arithmetic.FP8)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[:, 0] = 0x38  # 1.0
    matrix = Fp8Matrix(
        codes=codes.view(torch.float8_e4m3fn), scale=torch.tensor([[1.0], [1e-4]]), block_rows=32, block_columns=128
    )
    linear = pack(library, Arithmetic.FP8, matrix, epilogue=Epilogue.GATED)
    x, found = torch.zeros(2, 64).bfloat16(), torch.ones(2, 32).bfloat16()
    x[0, 0], x[1, 0] = -88.0, -80.0
    linear(x, found)
    expected = (x[:, 0].double() * 1e-4 * x[:, 0].double() * x[:, 0].double().exp()).float()
    assert 0.0 < expected[0] < torch.finfo(torch.bfloat16).tiny < expected[1]
    assert (found[0] == 0.0).all() or torch.allclose(found[0].float(), expected[0], rtol=0.01, atol=0.0)
    assert torch.allclose(found[1].float(), expected[1], rtol=0.01, atol=0.0)


def test_cpu_gemm_codes_of_floats_take_little_more_than_their_bits(library):
    weight = torch.randn(256, 1024)
    for scheme, bits in ((WeightScheme.FP8, 8.5), (WeightScheme.NF4, 4.5)):
        matrix = scheme.quantize(weight)
        linear = pack(library, stored_arithmetic(library.features, matrix), matrix)
        assert linear.nbytes <= weight.numel() * bits / 8 + 64


def test_cpu_gemm_codes_of_floats_cannot_be_looked_up(library):
    matrix = float_codes(40, 64, Arithmetic.FP8)
    with pytest.raises(ValueError, match="cannot be looked up"):
        pack(library, Arithmetic.FP8, matrix).embed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64).bfloat16())


def test_cpu_gemm_only_codes_of_floats_in_groups_of_64_stay_stored(library):
    fp8, table = float_codes(96, 256, Arithmetic.FP8), float_codes(96, 256, Arithmetic.TABLE16)
    assert isinstance(table, Table16Matrix)
    features = library.features
    assert stored_arithmetic(features, fp8.columns(64, 256)) is Arithmetic.FP8
    assert stored_arithmetic(features, table.columns(64, 160), torch.float32) is Arithmetic.TABLE16_FLOAT32
    others = [
        replace(fp8, codes=fp8.codes.float().to(torch.float8_e5m2)),
        replace(fp8, scale=fp8.scale * 1e35),
        replace(fp8, block_columns=32, scale=torch.ones(2, 8)),
        table.columns(32, 160),
    ]
    assert [stored_arithmetic(features, other) for other in others] == [None] * len(others)
    assert stored_arithmetic(features, fp8, torch.float16) is None
    assert stored_arithmetic(features, stored_matrix(8, 128, 64, Arithmetic.INT4), torch.float32) is None


def test_cpu_gemm_only_forms_with_kernels_stay_stored(library):
    matrix = stored_matrix(8, 128, 64, Arithmetic.INT4)
    assert stored_arithmetic(library.features, matrix) is Arithmetic.INT4
    finer = replace(matrix, scale=matrix.scale.float() * (1 + 2**-15), zero=matrix.zero - 9)
    assert stored_arithmetic(library.features, finer) is Arithmetic.INT4_OFFSETS
    eight = replace(matrix, bits=8, codes=torch.zeros(8, 128, dtype=torch.uint8))
    assert stored_arithmetic(library.features, eight) is Arithmetic.INT8_OFFSETS
    sixteens = {"group_size": 16, "scale": torch.rand(8, 8) + 1, "zero": torch.full((8, 8), 128, dtype=torch.int16)}
    halves = replace(eight, **sixteens)
    assert stored_arithmetic(library.features, halves) is Arithmetic.INT8_HALVES
    pairs = torch.ones(8, 4).repeat_interleave(2, dim=1)
    assert stored_arithmetic(library.features, replace(halves, offset=pairs)) is Arithmetic.INT8_OFFSET_HALVES
    others = [
        replace(halves, zero=halves.zero - 96),
        replace(halves, offset=torch.rand(8, 8)),
        replace(halves, group_size=8, scale=torch.ones(8, 16), zero=torch.full((8, 16), 128, dtype=torch.int16)),
        replace(matrix, group_size=16, scale=torch.ones(8, 8), zero=torch.full((8, 8), 8, dtype=torch.int16)),
        replace(matrix, offset=torch.full((8, 2), 1e5)),
        replace(matrix, group_of_column=torch.arange(128) // 64),
        replace(matrix, scale=matrix.scale.bfloat16() * 1e-9),
        replace(matrix, scale=matrix.scale.float() * 1e9),
        DenseMatrix(values=torch.ones(8, 128)),
        Int8Matrix(codes=torch.ones(8, 128, dtype=torch.int8), scale=torch.ones(8)),
    ]
    assert [stored_arithmetic(library.features, other) for other in others] == [None] * len(others)


def test_cpu_gemm_int4_takes_9_bits_for_two_weights(library):
    weight = torch.randn(256, 1024).bfloat16()
    assert pack(library, Arithmetic.INT4, weight).nbytes == weight.numel() * 9 / 16


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx512vnni"])
def test_cpu_gemm_groups_give_the_same_bits_with_fewer_instructions(library, flag, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, flag))
    other = KernelLibrary(build.build(tmp_path))
    generator = torch.Generator().manual_seed(1)
    for columns, depth in SHAPES:
        weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).bfloat16()
        bias = torch.randn(columns, generator=generator).bfloat16()
        for num_rows in ROWS:
            x = torch.randn(num_rows, depth, generator=generator).bfloat16()
            for epilogue in Epilogue:
                stored = [stored_matrix(columns, depth, 16 if one in HALVES else 64, one) for one in GROUPED]
                if columns == 100:  # the largest sums
                    x = torch.where(x < 0, -3.0, 3.0).bfloat16()
                    stored = [replace(matrix, codes=torch.full_like(matrix.codes, 255)) for matrix in stored]
                stored += [float_codes(columns, depth, one) for one in FLOATS]
                kinds = (*GROUPED, *FLOATS)
                for arithmetic, matrix in ((Arithmetic.INT4, weight), *zip(kinds, stored, strict=True)):
                    results = []
                    for one in (library, other):
                        linear = pack(one, arithmetic, matrix, bias, epilogue)
                        results.append(torch.ones(num_rows, linear.columns).to(linear.out_dtype))
                        linear(x.to(arithmetic.dtype), results[-1])
                    assert torch.equal(*results), (arithmetic, columns, depth, num_rows, epilogue)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_cpu_gemm_int4_weight_that_is_not_finite_shows(library, bad):
    weight = torch.randn(40, 64).bfloat16()
    weight[5, 40] = bad
    out = torch.empty(2, 40, dtype=torch.bfloat16)
    pack(library, Arithmetic.INT4, weight)(torch.randn(2, 64).bfloat16(), out)
    assert not out[:, 5].isfinite().any()
    assert out[:, [column for column in range(40) if column != 5]].isfinite().all()


@pytest.mark.parametrize("arithmetic", QUANTIZED)
def test_cpu_gemm_quantized_zero_rows_and_weights_stay_zero(library, arithmetic):
    needs(arithmetic)
    weight = torch.randn(40, 64).bfloat16()
    weight[3] = 0
    x = torch.randn(3, 64).bfloat16()
    x[1] = 0
    out = torch.empty(3, 40, dtype=torch.bfloat16)
    pack(library, arithmetic, weight)(x, out)
    assert (out[1] == 0).all()
    assert (out[:, 3] == 0).all()
    assert (out[0, :3] != 0).all()


@pytest.mark.parametrize("arithmetic", WHOLE)
@pytest.mark.parametrize("depth", [64, 71, 1])
def test_cpu_gemm_packed_head_returns_embeddings(library, arithmetic, depth):
    needs(arithmetic)
    dtype = arithmetic.dtype
    weight = torch.randn(101, depth).to(dtype)
    linear = pack(library, arithmetic, weight, epilogue=Epilogue.STORE_FLOAT32)
    ids = torch.tensor([0, 100, 31, 32, 33, 15, 16, 0, 99])
    out = torch.empty(len(ids), depth, dtype=dtype)
    linear.embed(ids, out)
    assert torch.equal(out, weight[ids])
    linear.embed(ids[:0], out[:0])
    for bad in (101, -1):
        with pytest.raises(IndexError, match="must be below 101"):
            linear.embed(torch.tensor([5, bad]), out[:2])
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("arithmetic", EIGHT_BITS)
@pytest.mark.parametrize("depth", [64, 71, 1, 130])
def test_cpu_gemm_int8_head_returns_its_own_rows(library, arithmetic, depth):
    """Those of AMX are laid out by code that every processor runs, so they are read here without its instructions."""
    if arithmetic is Arithmetic.INT8_DOT:
        needs(arithmetic)  # its layout is compiled with its kernel alone
    weight = torch.randn(101, depth).bfloat16()
    name, panels = arithmetic.value, 4
    packed = torch.empty(library.function(f"tandem_{name}_packed_bytes", "ii", "i")(panels, depth), dtype=torch.uint8)
    scales = torch.empty(panels * 32)
    library.function(f"tandem_{name}_pack", "piiiippi")(
        weight.data_ptr(), depth, 101, depth, 0, packed.data_ptr(), scales.data_ptr(), 2
    )
    ids = torch.tensor([0, 100, 31, 32, 33, 15, 16, 0, 99])
    out = torch.full((len(ids), depth + 3), 7.0).bfloat16()
    embed = library.function(f"tandem_{name}_embed", "ppiipipii", "i")
    rest = (101, depth, ids.data_ptr(), len(ids), out.data_ptr(), depth + 3, 2)
    assert embed(packed.data_ptr(), scales.data_ptr(), *rest) == 1
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    units = (weight.float() * torch.div(torch.full_like(largest, 127), largest)).round()
    assert torch.equal(out[:, :depth], (units * (largest / 127)).bfloat16()[ids])
    assert (out[:, depth:] == 7).all()
    ids[4] = 101
    assert embed(packed.data_ptr(), scales.data_ptr(), *rest) == 0


def test_cpu_gemm_invalid_embedding_lookup_raises(library):
    out = torch.empty(1, 64)
    four_bits = pack(library, Arithmetic.INT4, torch.randn(64, 64).bfloat16())
    with pytest.raises(ValueError, match="cannot be looked up"):
        four_bits.embed(torch.tensor([0]), out.bfloat16())
    gated = pack(library, Arithmetic.FLOAT32, torch.randn(64, 64), epilogue=Epilogue.GATED)
    with pytest.raises(ValueError, match="cannot be looked up"):
        gated.embed(torch.tensor([0]), out)
    plain = pack(library, Arithmetic.FLOAT32, torch.randn(64, 64))
    with pytest.raises(ValueError, match="contiguous int64"):
        plain.embed(torch.tensor([0], dtype=torch.int32), out)
    with pytest.raises(ValueError, match="cannot hold"):
        plain.embed(torch.tensor([0]), out[:, :32])


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.ones(4, 65), torch.ones(4, 32)),
        (torch.ones(4, 64), torch.ones(4, 31)),
        (torch.ones(4, 64), torch.ones(3, 32)),
        (torch.ones(64, 4).T, torch.ones(4, 32)),
        (torch.ones(4, 64), torch.ones(32, 4).T),
        (torch.ones(4, 64).bfloat16(), torch.ones(4, 32)),
        (torch.ones(4, 64), torch.ones(4, 32).bfloat16()),
    ],
)
def test_cpu_gemm_mismatched_tensors_are_refused(library, x, out):
    linear = pack(library, Arithmetic.FLOAT32, torch.randn(32, 64))
    with pytest.raises(ValueError, match="projection"):
        linear(x, out)


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (torch.randn(32, 64).half(), {}),
        (torch.randn(32, 64).bfloat16(), {}),
        (torch.randn(32, 64), {"arithmetic": Arithmetic.BF16_VECTORS}),
        (torch.randn(64, 32).T, {}),
        (torch.randn(33, 64), {"epilogue": Epilogue.GATED}),
        (torch.randn(32, 64), {"bias": torch.zeros(31)}),
        (torch.randn(0, 64), {}),
        (torch.randn(64), {}),
    ],
)
def test_cpu_gemm_unpackable_weights_are_refused(library, weight, options):
    with pytest.raises(ValueError, match=r"to pack|packed|equally many|does not fit"):
        PackedLinear(library, weight, **{"arithmetic": Arithmetic.FLOAT32, **options})


def test_cpu_gemm_without_amx_is_detected():
    features = CpuFeatures.from_bits(0b1)
    assert supports(features, Arithmetic.FLOAT32)
    assert not supports(features, Arithmetic.BF16)
    assert not supports(features, Arithmetic.INT8)
    assert best_arithmetic(features, torch.bfloat16) is Arithmetic.BF16_VECTORS
    slow_dot, fast_dot = CpuFeatures.from_bits(0b0000111), CpuFeatures.from_bits(0b1000111)
    assert supports(slow_dot, Arithmetic.BF16_DOT)
    assert best_arithmetic(slow_dot, torch.bfloat16) is Arithmetic.BF16_VECTORS
    assert best_arithmetic(fast_dot, torch.bfloat16) is Arithmetic.BF16_DOT
    assert best_arithmetic(CpuFeatures.from_bits(0b1010111), torch.bfloat16) is Arithmetic.BF16
    vnni, amx = CpuFeatures.from_bits(0b0001011), CpuFeatures.from_bits(0b0111111)
    assert not supports(features, Arithmetic.INT8_DOT)
    assert best_arithmetic(features, torch.bfloat16, quantization="int8") is Arithmetic.INT8_VECTORS
    assert best_arithmetic(vnni, torch.bfloat16, quantization="int8") is Arithmetic.INT8_DOT
    assert best_arithmetic(amx, torch.bfloat16, quantization="int8") is Arithmetic.INT8
    assert best_arithmetic(features, torch.bfloat16, quantization="int4") is Arithmetic.INT4
    with pytest.raises(ValueError, match="cannot be quantized as 'auto'"):
        best_arithmetic(features, torch.bfloat16, quantization="auto")
    with pytest.raises(ValueError, match="as int8"):
        best_arithmetic(features, torch.float32, quantization="int8")


def test_cpu_gemm_packing_adds_little_memory(library):
    weight = torch.randn(1000, 64)
    linear = pack(library, Arithmetic.FLOAT32, weight)
    assert weight.nbytes <= linear.nbytes <= 1.1 * weight.nbytes


def test_cpu_ceilings_and_projection_rates_are_positive(library):
    ceilings = measure_ceilings(library, num_threads=1, rounds=1, read_bytes=2**22)
    assert 0.1 < ceilings.read_gb_s < 10_000
    assert (ceilings.tile_tflop_s > 0) == library.features.amx_bf16
    shape = ProjectionShape(name="small", depth=256, rows_out=256, epilogue=Epilogue.ADD)
    rates = measure_projection(library, shape, rows=[1, 128], num_threads=1, rounds=1, pool_bytes=2**20)
    assert {rate.num_rows for rate in rates} == {1, 128}
    for rate in rates:
        assert rate.gb_s > 0
        assert rate.tflop_s > 0
        assert rate.predicted_seconds(ceilings) > 0
    assert {shape.name for shape in REFERENCE_SHAPES} == {"qkv", "gate_up", "down", "head"}
