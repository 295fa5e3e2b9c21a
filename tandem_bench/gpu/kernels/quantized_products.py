"""Products of quantized weights: against their restored values, and in how much of the time of 16-bit ones."""

from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton import reference
from engine.kernels.triton.gemm_few import FewRowsWorkspace
from engine.kernels.triton.quantized.byte_gemm import byte_gemm
from engine.kernels.triton.quantized.group_gemm import group_gemm
from engine.kernels.triton.quantized.group_weights import GroupWeights, pack_groups
from engine.kernels.triton.quantized.round_rows import round_rows
from engine.kernels.triton.tuning import QuantizedLaunch
from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import Fp8Matrix, GroupIntMatrix, StoredMatrix
from tandem_bench.gpu.kernels.cases import HOPELESS, case_numbers, error_share, launches, naming, num_sms, randn
from tandem_bench.gpu.stage import Findings, Stage
from tandem_bench.gpu.timing import Numbered, seconds_per_call
from tandem_bench.report import figure

_MOST_CASES = 24
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-5, torch.bfloat16: 5e-5}
"""Of sums in float32: what is multiplied is exact."""
_ROUNDED_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_MATRICES = {"output": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
"""Output features and depth of an 8B model's products."""
_SMALL_MATRICES = {"output": (64, 128)}
_ROWS = (1, 16, 64, 512, 4096)
_COLD_BYTES = 192 << 20
"""Weights to go through before the same are multiplied again: more than caches hold."""


def group_gemm_parity(stage: Stage) -> Findings:
    """Compare every form, few rows and many, split and gated; a row's sums must not depend on the other rows."""
    for dtype in stage.kernel_dtypes:
        worst, number = 0.0, 0
        for number in case_numbers(stage, 1 / len(stage.kernel_dtypes), _MOST_CASES):
            rng = Random(f"group_gemm:{stage.seed}:{dtype}:{number}")
            with naming(f"case {number} of {dtype}"):
                worst = max(worst, _parity_case(stage, rng, dtype, number))
        name = f"parity.group_gemm.{str(dtype).removeprefix('torch.')}"
        yield figure(name, worst, "of tolerance", at_most=1.0)
        yield figure(f"{name}.cases", number + 1, "")


def byte_gemm_parity(stage: Stage) -> Findings:
    """Compare rows rounded to bytes, code for code, and their products with those of whole numbers."""
    for dtype in stage.kernel_dtypes:
        worst, number = 0.0, 0
        for number in case_numbers(stage, 1 / len(stage.kernel_dtypes), _MOST_CASES):
            rng = Random(f"byte_gemm:{stage.seed}:{dtype}:{number}")
            with naming(f"case {number} of {dtype}"):
                worst = max(worst, _bytes_case(stage, rng, dtype))
        name = f"parity.byte_gemm.{str(dtype).removeprefix('torch.')}"
        yield figure(name, worst, "of tolerance", at_most=1.0)
        yield figure(f"{name}.cases", number + 1, "")


def group_gemm_speed(stage: Stage) -> Findings:
    """Time four bits in groups of 128 with zeros, and E4M3 in blocks, beside the library's product in 16 bits."""
    for matrix, (features, depth) in (_SMALL_MATRICES if stage.is_small else _MATRICES).items():
        dense = _DenseWeights(stage, features, depth)
        for form in ("int4", "fp8"):
            stored = _stored(Random(f"group_gemm:{matrix}"), form, features, depth)
            # About as many bytes go through the cache as of the dense ones.
            held = [pack_groups(stored, stage.place) for _ in range(len(dense.copies) * (4 if form == "int4" else 2))]
            for rows in (2,) if stage.is_small else _ROWS:
                x = dense.rows(rows)
                ours_s = seconds_per_call(_product_call(stage, held, x), stage.place)
                name = f"speed.group_gemm.{form}.{matrix}.{rows}"
                yield figure(name, ours_s * 1e6, "us")
                yield figure(f"{name}.rate", held[0].nbytes / ours_s / 1e9, "GB/s")
                yield figure(f"{name}.gain", seconds_per_call(dense.call(x), stage.place) / ours_s, "x")


class _DenseWeights:
    """Copies of a random matrix in 16 bits, more than caches hold."""

    def __init__(self, stage: Stage, features: int, depth: int) -> None:
        self._depth, self._place = depth, stage.place
        self._dtype = torch.float16 if stage.is_small else torch.bfloat16
        count = 1 if stage.is_small else -(-_COLD_BYTES // (2 * features * depth))
        self.copies = [torch.randn(features, depth, device=self._place).to(self._dtype) for _ in range(count)]

    def rows(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, self._depth, device=self._place).to(self._dtype)

    def call(self, x: Tensor) -> Numbered:
        return lambda i: F.linear(x, self.copies[i % len(self.copies)])


def _parity_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    form = ("int4", "int4-zeros", "int4-offsets", "int8", "int8-halves", "fp8")[number % 6]
    features, depth = rng.choice([(40, 64)] if stage.is_small else [(70, 480), (1024, 4096), (4096, 14_336)])
    rows = rng.choice([1, 3] if stage.is_small else [1, 3, 16, 70, 300])
    stored = _stored(rng, form, features, depth)
    weights = pack_groups(stored, stage.place)
    x = randn(rng, rows, depth + 8, dtype=dtype, device=stage.place)[:, :depth]
    bias = randn(rng, features, dtype=dtype, device=stage.place) if number % 2 else None
    residual = randn(rng, rows, features, dtype=dtype, device=stage.place)
    expected = reference.linear(x, stored.dequantized().to(stage.place), bias)
    found, added = torch.empty_like(expected), residual.clone()
    for _ in range(1 if stage.is_small else 3):  # one after another, as in a step: each may begin while one ends
        added.copy_(residual)
        _multiply(stage, x, weights, bias, found)
        _multiply(stage, x, weights, bias, added, residual=added)
    gated = torch.empty(rows, features // 2, dtype=dtype, device=stage.place)
    _multiply(stage, x, weights, None, gated, is_gated=True)
    unbiased = expected if bias is None else expected - bias.float()
    fixed = launches(stage).quantized("groups", deterministic=True)[0]
    whole, alone = torch.empty_like(expected), torch.empty_like(expected[:1])
    group_gemm(x, weights, bias, whole, fixed)
    group_gemm(x[rows // 2 : rows // 2 + 1], weights, bias, alone, fixed)
    if not torch.equal(alone[0], whole[rows // 2]):
        return HOPELESS
    return max(
        error_share(found, expected, _TOLERANCE[dtype]),
        error_share(whole, expected, _TOLERANCE[dtype]),
        error_share(added, residual.float() + expected, _ROUNDED_TOLERANCE[dtype]),
        error_share(gated, reference.silu_mul(unbiased.to(dtype)), _ROUNDED_TOLERANCE[dtype]),
    )


def _bytes_case(stage: Stage, rng: Random, dtype: torch.dtype) -> float:
    features, depth = rng.choice([(40, 96), (64, 160)] if stage.is_small else [(70, 480), (1024, 4096), (4096, 14_336)])
    rows = rng.choice([1, 3, 16] if stage.is_small else [1, 3, 16, 70, 300])
    x = randn(rng, rows, depth + 8, dtype=dtype, device=stage.place)[:, :depth]
    weight = (randn(rng, features, depth, dtype=torch.float32, device=stage.place) * 40).clamp(-127, 127).to(torch.int8)
    scale = randn(rng, features, dtype=torch.float32, device=stage.place).abs()
    codes, row_scale = torch.empty(rows, depth, dtype=torch.int8, device=stage.place), torch.empty_like(x[:, 0]).float()
    round_rows(x, codes, row_scale, pdl=_has_pdl(stage))
    expected_codes, expected_scale = reference.rounded_rows(x)
    if not torch.equal(codes, expected_codes) or not torch.equal(row_scale, expected_scale):
        return HOPELESS
    expected = (codes.double() @ weight.double().T).float() * row_scale[:, None] * scale
    worst = 0.0
    for launch in (*launches(stage).quantized("bytes"), *launches(stage).quantized("bytes", deterministic=True)):
        if launch.rows and rows > launch.rows:
            continue
        out = torch.empty_like(expected)
        splits = launch.num_splits(features, -(-depth // launch.block_k), num_sms(stage))
        num_tiles = -(-features // launch.block_n)
        workspace = FewRowsWorkspace.allocate(
            num_tiles * splits * launch.block_n * launch.block_m, num_tiles, stage.place
        )
        byte_gemm(
            codes, row_scale, weight, scale, None, out, launch, workspace=workspace, num_splits=splits,
            pdl=_has_pdl(stage),
        )  # fmt: skip
        worst = max(worst, error_share(out, expected, 1e-6))
    return worst


def _multiply(
    stage: Stage,
    x: Tensor,
    weights: GroupWeights,
    bias: Tensor | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """Multiply as the backend does."""
    launch = _launch_for(stage, len(x))
    splits = 1 if is_gated else launch.num_splits(out.shape[1], -(-x.shape[1] // weights.span), num_sms(stage))
    num_tiles = -(-out.shape[1] // launch.block_n)
    workspace = FewRowsWorkspace.allocate(num_tiles * splits * launch.block_n * launch.block_m, num_tiles, stage.place)
    group_gemm(
        x,
        weights,
        bias,
        out,
        launch,
        residual=residual,
        workspace=workspace,
        num_splits=splits,
        is_gated=is_gated,
        pdl=_has_pdl(stage),
    )


def _product_call(stage: Stage, held: list[GroupWeights], x: Tensor) -> Numbered:
    features = held[0].shape[0]
    out = x.new_empty(len(x), features)
    launch = _launch_for(stage, len(x))
    splits = launch.num_splits(features, -(-x.shape[1] // held[0].span), num_sms(stage))
    num_tiles = -(-features // launch.block_n)
    workspace = FewRowsWorkspace.allocate(num_tiles * splits * launch.block_n * launch.block_m, num_tiles, stage.place)
    pdl = _has_pdl(stage)
    return lambda i: group_gemm(
        x, held[i % len(held)], None, out, launch, workspace=workspace, num_splits=splits, pdl=pdl
    )


def _launch_for(stage: Stage, num_rows: int) -> QuantizedLaunch:
    found = launches(stage).quantized("groups")
    return next(launch for launch in found if not launch.rows or num_rows <= launch.rows)


def _has_pdl(stage: Stage) -> bool:
    return stage.place.type == "cuda" and torch.cuda.get_device_capability(stage.place) >= (9, 0)


def _stored(rng: Random, form: str, features: int, depth: int) -> StoredMatrix:
    """Draw weights of a form whose products are about as large as the rows."""
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    if form == "fp8":
        width = 128 if depth % 128 == 0 else 32
        codes = torch.randn(features, depth, generator=generator).to(torch.float8_e4m3fn)
        shape = (-(-features // width), -(-depth // width))
        scale = (torch.rand(shape, generator=generator) + 0.5) * depth**-0.5
        return Fp8Matrix(codes=codes, scale=scale, block_rows=width, block_columns=width)
    bits = 8 if form.startswith("int8") else 4
    group = 16 if form.endswith("halves") else 128 if depth % 128 == 0 else 32
    middle, num_groups = 1 << (bits - 1), depth // group
    codes = torch.randint(0, 2 * middle, (features, depth), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 2 * middle, (features, num_groups), generator=generator, dtype=torch.int16)
    scale = (torch.rand(features, num_groups, generator=generator) + 0.5) * depth**-0.5 / middle
    return GroupIntMatrix(
        bits=bits,
        num_columns=depth,
        codes=pack_nibbles(codes) if bits == 4 else codes,
        scale=scale.half(),
        zero=zero if form in ("int4", "int4-zeros") else torch.full_like(zero, middle),
        offset=torch.rand(features, num_groups, generator=generator) * depth**-0.5 if "offsets" in form else None,
        group_size=group,
    )
