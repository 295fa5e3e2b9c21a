"""Row-wise kernels at an 8B model's sizes, each with plain torch code that computes the same."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from engine.kernels.triton import reference
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.rope_kv import rope_kv
from engine.kernels.triton.sampling import TritonSampling
from engine.sampling.backend import DrawParams, TorchSampling
from tandem_bench.gpu.kernels.cases import gemm_launch
from tandem_bench.gpu.stage import Stage
from tandem_bench.gpu.timing import Numbered

_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowKernel:
    """One kernel at one size."""

    name: str
    ours: Numbered
    theirs: Numbered
    num_bytes: int | None = None
    """Bytes that must be moved."""
    waits: bool = False
    """Whether the torch code waits for the device in between, so that no graph can hold it."""
    is_option: bool = False
    """Whether users choose this at a cost, so that no speed goal applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    rows: int
    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def label(self) -> str:
        return str(self.rows)


def row_kernels(stage: Stage) -> Iterator[RowKernel]:
    """Yield kernels for a decode step of 64 sequences and for 8k prompt tokens; sampling for the 64 only."""
    large = _Sizes(rows=64, hidden=4096, inner=14_336, vocab=128_256, heads=32, kv_heads=8, head_dim=128)
    small = _Sizes(rows=3, hidden=64, inner=96, vocab=600, heads=4, kv_heads=2, head_dim=32)
    sizes = (small,) if stage.is_small else (large, replace(large, rows=8192))
    for size in sizes:
        yield _norm(stage, size)
        yield _gate(stage, size)
        yield _rotation(stage, size)
    yield _sampling(stage, sizes[0])
    yield _fixed_product(stage, sizes[0])


def _norm(stage: Stage, size: _Sizes) -> RowKernel:
    dtype, place = getattr(torch, stage.dtype), stage.place
    residual, delta = (torch.randn(size.rows, size.hidden, device=place).to(dtype) for _ in range(2))
    weight, out = torch.ones(size.hidden, dtype=dtype, device=place), torch.empty_like(residual)

    def theirs(_number: int) -> object:
        residual.add_(delta)
        return F.rms_norm(residual, (size.hidden,), weight, _EPS)

    return RowKernel(
        name=f"add_rms_norm.{size.label}",
        ours=lambda _: add_rms_norm(residual, delta, weight, _EPS, out),
        theirs=theirs,
        num_bytes=4 * residual.nbytes,
    )


def _gate(stage: Stage, size: _Sizes) -> RowKernel:
    dtype, place = getattr(torch, stage.dtype), stage.place
    stacked = torch.randn(size.rows, 2 * size.inner, device=place).to(dtype)
    out = torch.empty(size.rows, size.inner, dtype=dtype, device=place)

    def theirs(_number: int) -> object:
        gate, up = stacked.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    return RowKernel(
        name=f"silu_mul.{size.label}",
        ours=lambda _: silu_mul(stacked, out),
        theirs=theirs,
        num_bytes=stacked.nbytes + out.nbytes,
    )


def _rotation(stage: Stage, size: _Sizes) -> RowKernel:
    dtype, place = getattr(torch, stage.dtype), stage.place
    block_size = 16
    blocks = -(-size.rows // block_size)
    pages = torch.zeros(blocks, 2, size.kv_heads, block_size, size.head_dim, dtype=dtype, device=place)
    layer = LayerPages(pages=pages)
    heads = size.heads + 2 * size.kv_heads
    qkv = torch.randn(size.rows, heads * size.head_dim, device=place).to(dtype)
    angles = torch.randn(size.rows, size.head_dim // 2, device=place)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.arange(size.rows, device=place)
    return RowKernel(
        name=f"rope_kv.{size.label}",
        ours=lambda _: rope_kv(qkv, layer, cos=cos, sin=sin, slots=slots, norm=None),
        theirs=lambda _: reference.rope_kv(qkv, layer, cos=cos, sin=sin, slots=slots, norm=None),
        num_bytes=2 * qkv.nbytes,
        waits=True,  # torch finds the used slots by querying their number on the device
    )


def _sampling(stage: Stage, size: _Sizes) -> RowKernel:
    place = stage.place
    logits = torch.randn(size.rows, size.vocab, device=place) * 2

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size.rows,), value, dtype=dtype, device=place)

    params = DrawParams(
        temperature=column(0.8, torch.float32),
        min_p=column(0.0, torch.float32),
        top_p=column(0.9, torch.float32),
        top_k=column(50, torch.int64),
        seed=torch.arange(size.rows, device=place),
        position=column(7, torch.int64),
        choice=column(0, torch.int64),
    )
    ours, theirs = TritonSampling(), TorchSampling()
    return RowKernel(
        name=f"sampling.{size.label}",
        ours=lambda _: ours.choose(logits, params),
        theirs=lambda _: theirs.choose(logits, params),
        waits=True,
    )


def _fixed_product(stage: Stage, size: _Sizes) -> RowKernel:
    """Return the deterministic product; it is expected to be slower, so only the figure is reported."""
    dtype, place = getattr(torch, stage.dtype), stage.place
    x = torch.randn(size.rows, size.hidden, device=place).to(dtype)
    weight = torch.randn(size.inner, size.hidden, device=place).to(dtype)
    out = torch.empty(size.rows, size.inner, dtype=dtype, device=place)
    launch = gemm_launch(stage, wide=dtype == torch.float32)
    return RowKernel(
        name=f"gemm_fixed.{size.label}",
        ours=lambda _: gemm_fixed(x, weight, None, out, launch),
        theirs=lambda _: F.linear(x, weight),
        num_bytes=weight.nbytes,
        is_option=True,
    )
