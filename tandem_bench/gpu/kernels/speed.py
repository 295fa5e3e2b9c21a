"""Speed of each kernel at an 8B model's shapes relative to other libraries: a gain of one means equal speed.

Attention uses the pages of enough layers that no cache holds them, as in a model.
"""

from collections.abc import Mapping
from random import Random

import torch

from engine.kernels.triton.flash_decode import DecodeWorkspace, cut_evenly, flash_decode
from engine.kernels.triton.paged_prefill import paged_prefill, row_starts_of
from engine.kernels.triton.pages import LayerPages
from tandem_bench.gpu.kernels.attention_peers import Paged, flash_infer, relative_difference, sdpa
from tandem_bench.gpu.kernels.cases import (
    attention_shape,
    decode_launches,
    int32,
    naming,
    num_sms,
    prefill_launch,
    random_tables,
)
from tandem_bench.gpu.kernels.row_peers import row_kernels
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.gpu.timing import Numbered, seconds_per_call, wall_seconds_per_call
from tandem_bench.report import figure

NO_SLOWER = 1.0
"""Minimum ratio of the others' time to ours (issue 3)."""
_SAME_WITHIN = 0.05
"""Tolerance relative to the largest value, in bfloat16; another mask or scale would exceed it by far."""
_COLD_BYTES = 512 << 20
"""Size of several times an H200's second-level cache."""
_BLOCK_SIZE = 16
_DECODES = ((1, 4096), (16, 4096), (64, 2048), (64, 8192))
_PREFILLS = ((1, 8192, 8192), (4, 2048, 2048), (1, 2048, 8192))
"""Sequences, rows of each, keys of each: a whole prompt, several, and a chunk over a prefix."""


def flash_decode_speed(stage: Stage) -> Findings:
    """Measure one row per sequence."""
    for num_seqs, length in ((2, 40),) if stage.is_small else _DECODES:
        case = _paged(stage, num_seqs, 1, length)
        name = f"flash_decode.{num_seqs}x{length}"
        with naming(name):
            out = torch.empty_like(case.queries)
            ours = _decode_call(stage, case, out)
            yield from _compared(stage, name, case, ours, out)


def paged_prefill_speed(stage: Stage) -> Findings:
    """Measure whole prompts and chunks of them."""
    for num_seqs, rows, length in ((1, 24, 24), (1, 9, 33)) if stage.is_small else _PREFILLS:
        case = _paged(stage, num_seqs, rows, length)
        name = f"paged_prefill.{num_seqs}x{rows}" + (f"-of-{length}" if length > rows else "")
        with naming(name):
            out = torch.empty_like(case.queries)
            ours = _prefill_call(stage, case, out)
            yield from _compared(stage, name, case, ours, out)


def row_kernels_speed(stage: Stage) -> Findings:
    """Measure fused kernels against plain torch, which they must beat."""
    for kernel in row_kernels(stage):
        timed = wall_seconds_per_call if kernel.waits and not stage.is_small else seconds_per_call
        with naming(kernel.name):
            ours, theirs = seconds_per_call(kernel.ours, stage.place), timed(kernel.theirs, stage.place)
        yield figure(f"{kernel.name}.ours", ours * 1e6, "us")
        if kernel.num_bytes is not None:
            yield figure(f"{kernel.name}.bandwidth", kernel.num_bytes / ours / 1e9, "GB/s")
        goal = None if kernel.is_option else stage.goal(NO_SLOWER)
        yield figure(f"{kernel.name}.gain.torch", theirs / ours, "x", at_least=goal)


def _compared(stage: Stage, name: str, case: Paged, ours: Numbered, out: torch.Tensor) -> Findings:
    own_s = seconds_per_call(ours, stage.place)
    yield figure(f"{name}.ours", own_s * 1e6, "us")
    if case.rows == 1:
        kv_bytes = 2 * case.num_seqs * case.length * case.layers[0].num_kv_heads * case.layers[0].head_dim
        yield figure(f"{name}.bandwidth", kv_bytes * case.queries.dtype.itemsize / own_s / 1e9, "GB/s")
    else:
        pairs = case.num_seqs * case.rows * (case.length - (case.rows - 1) / 2)
        flops = 4 * pairs * case.queries.shape[1] * case.queries.shape[2]
        yield figure(f"{name}.arithmetic", flops / own_s / 1e12, "TFLOP/s")
    ours(0)
    found = out.clone()
    for made in (sdpa, _flash_infer):
        peers = made(case)
        if isinstance(peers, str):
            yield Note(name=f"{name}.flashinfer", text=peers)
            continue
        for peer, call in peers.items():
            yield from _compared_with_peer(stage, f"{name}.{{}}.{peer}", case, call, found, own_s)


def _compared_with_peer(
    stage: Stage, name: str, case: Paged, call: Numbered, found: torch.Tensor, own_s: float
) -> Findings:
    """Compare with a peer; one that does not support the shape, or differs, is reported and not timed."""
    try:
        apart = relative_difference(found, call, case)
        theirs_s = seconds_per_call(call, stage.place)
    except RuntimeError as problem:
        yield Note(name=name.format("left_out"), text=f"{problem!s:.200}")
        return
    if apart > _SAME_WITHIN:
        yield figure(name.format("apart"), apart, "of the largest value", at_most=_SAME_WITHIN)
        return
    yield figure(name.format("gain"), theirs_s / own_s, "x", at_least=stage.goal(NO_SLOWER))


def _flash_infer(case: Paged) -> Mapping[str, Numbered] | str:
    """Return FlashInfer's call, or why it is not available: it compiles kernels on demand."""
    try:
        return flash_infer(case) or "not installed"
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem!s:.200}"


def _paged(stage: Stage, num_seqs: int, rows: int, length: int) -> Paged:
    kv_heads, group, head_dim = (2, 2, 32) if stage.is_small else (8, 4, 128)
    dtype, place = getattr(torch, stage.dtype), stage.place
    blocks = num_seqs * -(-length // _BLOCK_SIZE)
    shape = (blocks, 2, kv_heads, _BLOCK_SIZE, head_dim)
    layer_bytes = torch.Size(shape).numel() * dtype.itemsize
    num_layers = 2 if stage.is_small else max(1, min(16, -(-_COLD_BYTES // layer_bytes)))
    rng = Random(f"speed:{num_seqs}:{rows}:{length}")
    return Paged(
        queries=torch.randn(num_seqs * rows, kv_heads * group, head_dim, device=place).to(dtype),
        layers=tuple(LayerPages(pages=torch.randn(shape, dtype=dtype, device=place)) for _ in range(num_layers)),
        tables=random_tables(rng, [length] * num_seqs, _BLOCK_SIZE, blocks, place),
        num_seqs=num_seqs,
        rows=rows,
        length=length,
    )


def _decode_call(stage: Stage, case: Paged, out: torch.Tensor) -> Numbered:
    layer, place = case.layers[0], stage.place
    heads, head_dim = case.queries.shape[1:]
    cut = cut_evenly(
        decode_launches(stage, attention_shape(layer.head_dim, case.queries.dtype, layer.pages.dtype)),
        batch=case.num_seqs,
        num_kv_heads=layer.num_kv_heads,
        max_length=case.length,
        num_sms=num_sms(stage),
    )
    workspace = DecodeWorkspace.allocate(cut.num_parts(case.num_seqs), heads, head_dim, place)
    lengths = int32([case.length] * case.num_seqs, place)
    return lambda i: flash_decode(
        case.queries,
        case.layers[i % len(case.layers)],
        out,
        tables=case.tables,
        lengths=lengths,
        window=None,
        cut=cut,
        workspace=workspace,
    )


def _prefill_call(stage: Stage, case: Paged, out: torch.Tensor) -> Numbered:
    layer, place = case.layers[0], stage.place
    launch = prefill_launch(stage, attention_shape(layer.head_dim, case.queries.dtype, layer.pages.dtype))
    row_starts = row_starts_of(int32([case.rows] * case.num_seqs, place))
    starts = int32([case.length - case.rows] * case.num_seqs, place)
    return lambda i: paged_prefill(
        case.queries,
        case.layers[i % len(case.layers)],
        out,
        tables=case.tables,
        row_starts=row_starts,
        starts=starts,
        window=None,
        launch=launch,
    )
