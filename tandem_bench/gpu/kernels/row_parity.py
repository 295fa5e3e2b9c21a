"""Kernels that work row by row, and the fixed product and sampling, against plain torch."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from engine.kernels.triton import reference
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_few import MAX_ROWS, FewRowsWorkspace, gemm_few
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.rope_kv import rope_kv
from engine.kernels.triton.sampling import TritonSampling
from engine.kernels.triton.tuning import FewRowsLaunch, OneRowLaunch
from engine.model.layers.norm import HeadNorm
from engine.sampling.backend import DrawParams, TorchSampling
from tandem_bench.gpu.kernels.cases import (
    EIGHT_BIT,
    HOPELESS,
    case_numbers,
    code_share,
    error_share,
    gemm_launch,
    naming,
    randn,
    random_pages,
)
from tandem_bench.gpu.stage import Findings, Stage
from tandem_bench.report import figure

_MOST_CASES = 24
_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_PRODUCT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-5, torch.bfloat16: 5e-5}
"""Tolerance of sums in float32, not rounded to the dtype; tensor cores truncate their last bits instead of rounding."""
_SIZES = (48, 576, 1024, 1100, 4096, 14_336)
_SMALL_SIZES = (48, 300)
_EPS = 1e-5

Check = Callable[[Stage, Random, torch.dtype, int], float]
"""Function that returns one case's worst error, as a share of the tolerance."""


def add_rms_norm_parity(stage: Stage) -> Findings:
    """Compare with and without an addition, and with strided rows."""
    yield from _over_dtypes(stage, "add_rms_norm", _norm_case)


def silu_mul_parity(stage: Stage) -> Findings:
    yield from _over_dtypes(stage, "silu_mul", _gate_case)


def rope_kv_parity(stage: Stage) -> Findings:
    """Compare head norms, rotation and the write, into caches of every dtype."""
    yield from _over_dtypes(stage, "rope_kv", _rope_case)


def gemm_fixed_parity(stage: Stage) -> Findings:
    """Compare the batch-invariant product, and check bit for bit that a row's sums do not depend on the other rows."""
    yield from _over_dtypes(stage, "gemm_fixed", _product_case)


def gemm_few_parity(stage: Stage) -> Findings:
    """Compare the product for few rows: parts of the depth, residual, gate, one after another."""
    yield from _over_dtypes(stage, "gemm_few", _few_rows_case)


def sampling_parity(stage: Stage) -> Findings:
    """Compare argmax and draws with the torch sampler, which must give the same token."""
    worst, number, num_rows = 0, 0, 0
    for number in case_numbers(stage, 1.0, _MOST_CASES):
        rng = Random(f"sampling:{stage.seed}:{number}")
        vocab_size = (600, 65)[number % 2] if stage.is_small else (65, 2048, 32_003, 128_256)[number % 4]
        rows = 4 if stage.is_small else 16
        logits = randn(rng, rows, vocab_size, dtype=torch.float32, device=stage.place) * rng.choice([0.5, 2.0, 6.0])
        params = _draw_params(rng, rows, stage.place)
        with naming(f"{rows} rows of {vocab_size}"):
            drawn, expected = TritonSampling().choose(logits, params), TorchSampling().choose(logits, params)
            highest, first = TritonSampling().choose(logits, None), TorchSampling().choose(logits, None)
        worst += int((drawn != expected).sum()) + int((highest != first).sum())
        num_rows += 2 * rows
    yield figure("parity.sampling.differing", worst, f"of {num_rows} tokens", at_most=0)
    yield figure("parity.sampling.cases", number + 1, "")


def _over_dtypes(stage: Stage, kernel: str, check: Check) -> Findings:
    for dtype in stage.kernel_dtypes:
        worst, number = 0.0, 0
        for number in case_numbers(stage, 1 / len(stage.kernel_dtypes), _MOST_CASES):
            with naming(f"case {number} of {dtype}"):
                worst = max(worst, check(stage, Random(f"{kernel}:{stage.seed}:{dtype}:{number}"), dtype, number))
        name = f"parity.{kernel}.{str(dtype).removeprefix('torch.')}"
        yield figure(name, worst, "of tolerance", at_most=1.0)
        yield figure(f"{name}.cases", number + 1, "")


def _size(stage: Stage, number: int) -> int:
    sizes = _SMALL_SIZES if stage.is_small else _SIZES
    return sizes[number % len(sizes)]


def _norm_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    size, rows = _size(stage, number), rng.choice([1, 3, 33])
    residual = randn(rng, rows, size, dtype=dtype, device=stage.place)
    weight = randn(rng, size, dtype=dtype, device=stage.place)
    delta = randn(rng, rows, size + 8, dtype=dtype, device=stage.place)[:, :size] if number % 4 else None
    ours, theirs, out = residual.clone(), residual.clone(), torch.empty_like(residual)
    add_rms_norm(ours, delta, weight, _EPS, out)
    expected = reference.add_rms_norm(theirs, delta, weight, _EPS)
    return max(error_share(out, expected, _TOLERANCE[dtype]), error_share(ours, theirs, _TOLERANCE[dtype]))


def _gate_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    size, rows = _size(stage, number), rng.choice([1, 4, 65])
    stacked = randn(rng, rows, 2 * size, dtype=dtype, device=stage.place) * 4
    out = torch.empty(rows, size, dtype=dtype, device=stage.place)
    silu_mul(stacked, out)
    return error_share(out, reference.silu_mul(stacked), _TOLERANCE[dtype])


def _rope_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    place = stage.place
    cache_dtype = (dtype, *EIGHT_BIT)[number % 3]
    head_dim = 32 if stage.is_small else (32, 64, 80, 96, 128, 256)[number % 6]
    num_kv_heads, rows = rng.choice([1, 2, 3, 8]), rng.choice([1, 5] if stage.is_small else [1, 5, 60])
    num_heads = num_kv_heads * rng.choice([1, 2, 3, 7])
    layer = random_pages(rng, (4, num_kv_heads, 16, head_dim), dtype=cache_dtype, device=place)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = randn(rng, rows, width, dtype=dtype, device=place)
    angles = randn(rng, rows, head_dim // 2, dtype=torch.float32, device=place) * 30
    slots = torch.tensor(rng.sample(range(64), rows), device=place)
    slots[-1] = -1 if number % 2 else slots[-1]  # padding writes nothing
    norm = None
    if number % 4 < 2:
        query, key = (randn(rng, head_dim, dtype=dtype, device=place) for _ in range(2))
        norm = HeadNorm(query, key, _EPS)
    expected_layer = reference.copied(layer)
    expected = qkv.clone()
    cos, sin = angles.cos(), angles.sin()
    reference.rope_kv(expected, expected_layer, cos=cos, sin=sin, slots=slots, norm=norm)
    rope_kv(qkv, layer, cos=cos, sin=sin, slots=slots, norm=norm)
    kept = width - 2 * num_kv_heads * head_dim
    queries = error_share(qkv[:, :kept], expected[:, :kept], _TOLERANCE[dtype])
    return max(queries, _pages_share(layer, expected_layer, dtype))


def _pages_share(found: LayerPages, expected: LayerPages, dtype: torch.dtype) -> float:
    if not found.is_quantised:
        return error_share(found.pages, expected.pages, _TOLERANCE[dtype])
    codes = code_share(found.pages, expected.pages)
    apart = (found.pages.float() != expected.pages.float()).float().mean().item()
    rare = 1e-3 if dtype == torch.float32 else 1e-2
    share = max(codes, apart / rare)
    if found.token_scales is None or expected.token_scales is None:
        return share
    return max(share, error_share(found.token_scales, expected.token_scales, _TOLERANCE[torch.float32]))


def _product_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    rows, features, depth = ((5, 40, 48), (33, 70, 100), (130, 1000, 520), (64, 4096, 4096))[
        number % (2 if stage.is_small else 4)
    ]
    x = randn(rng, rows, depth + 8, dtype=dtype, device=stage.place)[:, :depth]
    weight = randn(rng, features, depth, dtype=dtype, device=stage.place) * depth**-0.5
    bias = randn(rng, features, dtype=dtype, device=stage.place) if number % 2 else None
    launch = gemm_launch(stage, wide=dtype == torch.float32)
    out = torch.empty(rows, features, dtype=torch.float32, device=stage.place)
    gemm_fixed(x, weight, bias, out, launch)
    alone = torch.empty(1, features, dtype=torch.float32, device=stage.place)
    gemm_fixed(x[rows // 2 : rows // 2 + 1], weight, bias, alone, launch)
    same = torch.equal(alone[0], out[rows // 2])
    return error_share(out, reference.linear(x, weight, bias), _PRODUCT_TOLERANCE[dtype]) if same else HOPELESS


def _few_rows_case(stage: Stage, rng: Random, dtype: torch.dtype, number: int) -> float:
    """Products one after another, as in a step: each may begin while the one before ends, and shares its memory."""
    place = stage.place
    depth = 96 if stage.is_small else rng.choice([512, 4096, 14_336])
    rows, splits = (1, rng.choice([2, 7]), MAX_ROWS)[(number // 2) % 3], (1, 2, 4)[number % 3]
    features = rng.choice([40, 64] if stage.is_small else [70, 1024, 4096])
    block_k = 32 if stage.is_small else 128
    launch = FewRowsLaunch(
        block_n=(32, 64)[number % 2], block_k=block_k, num_warps=4, num_stages=3, num_splits=splits, prefetch_lines=2
    )
    pdl = place.type == "cuda" and torch.cuda.get_device_capability(place) >= (9, 0)
    workspace = FewRowsWorkspace.allocate(splits * (features + launch.block_n) * MAX_ROWS, features, place)
    x = randn(rng, rows, depth + 8, dtype=dtype, device=place)[:, :depth]
    weight = randn(rng, features, depth, dtype=dtype, device=place) * depth**-0.5
    gated = randn(rng, 2 * depth, features, dtype=dtype, device=place) * features**-0.5
    bias = randn(rng, features, dtype=dtype, device=place) if number % 2 else None
    residual = randn(rng, rows, features, dtype=dtype, device=place)
    once, out = residual.clone(), torch.empty(rows, features, dtype=torch.float32, device=place)
    for _ in range(3):
        gemm_few(x, weight, bias, out, launch, workspace=workspace, pdl=pdl)
        gemm_few(x, weight, bias, once, launch, residual=residual, workspace=workspace, pdl=pdl)
    product = reference.linear(x, weight, bias)
    pairs = [(out, once)]
    one = OneRowLaunch(block_n=8, block_k=block_k, num_warps=4)
    if rows == 1:
        pairs.append((torch.empty_like(out), residual.clone()))
        gemv(x, weight, bias, pairs[1][0], one, pdl=pdl)
        gemv(x, weight, bias, pairs[1][1], one, residual=residual, pdl=pdl)
    added = residual.float() + product
    share = max(error_share(plain, product, _PRODUCT_TOLERANCE[dtype]) for plain, _ in pairs)
    share = max(share, *(error_share(sums, added, _TOLERANCE[dtype]) for _, sums in pairs))
    if features % block_k:
        return share
    # Reads what the product before has just written.
    activated = torch.empty(rows, depth, dtype=dtype, device=place)
    expected = reference.silu_mul(reference.linear(once, gated, None).to(dtype))
    gemm_few(once, gated, None, activated, replace(launch, num_splits=1), is_gated=True, pdl=pdl)
    share = max(share, error_share(activated, expected, _TOLERANCE[dtype]))
    if rows == 1:
        gemv(once, gated, None, activated, one, is_gated=True, pdl=pdl)
        share = max(share, error_share(activated, expected, _TOLERANCE[dtype]))
    return share


def _draw_params(rng: Random, rows: int, place: torch.device) -> DrawParams:
    def floats(*choices: float) -> Tensor:
        return torch.tensor([rng.choice(choices) for _ in range(rows)], dtype=torch.float32, device=place)

    def integers(choose: Callable[[], int]) -> Tensor:
        return torch.tensor([choose() for _ in range(rows)], dtype=torch.int64, device=place)

    return DrawParams(
        temperature=floats(0.3, 0.7, 1.0, 1.5),
        min_p=floats(0.0, 0.0, 0.01, 0.1, 0.5),
        top_p=floats(1.0, 1.0, 0.1, 0.5, 0.9, 0.95),
        top_k=integers(lambda: rng.choice([0, -1, 1, 2, 5, 50, 1000])),
        seed=integers(lambda: rng.getrandbits(63) - 2**62),
        position=integers(lambda: rng.randrange(5000)),
        choice=integers(lambda: rng.randrange(16)),
    )
