"""How many sequences a quantised cache holds in the memory of a plain one, and attention over all of them at once."""

import torch

from engine.kernels.triton import reference
from engine.kernels.triton.flash_decode import DecodeCut, flash_decode
from engine.kernels.triton.pages import LayerPages
from engine.kv_storage.kv_codes import LARGEST_CODE
from engine.kv_storage.paged_cache import PagedKVCache
from tandem.values.kv_layout import KVLayout
from tandem_bench.gpu.kernels.cases import attention_shape, decode_launches, error_share, int32
from tandem_bench.gpu.stage import Findings, Stage
from tandem_bench.gpu.timing import seconds_per_call
from tandem_bench.report import figure

HELD_GOAL = 2.0
"""Goal for the ratio of sequences held (issue 3)."""
_QUANTISED_DTYPES = ("int8", "fp8_e4m3")
"""Those that GPUs compute: `int4` has kernels for CPUs alone (ADR 47)."""
_LENGTH, _SMALL_LENGTH = 2048, 48
_POOL_BYTES, _SMALL_POOL_BYTES = 2 << 30, 1 << 16
"""Size of one layer's pool; the other layers are the same."""
_BLOCK_SIZE = 16
_TOLERANCE = 2e-2
_NUM_CHECKED = 3


def sequences_held(stage: Stage) -> Findings:
    """Allocate the pools, fill them, and compute attention over them."""
    held: dict[str, int] = {}
    for dtype in (stage.dtype, *_QUANTISED_DTYPES):
        name = dtype.removesuffix("_e4m3")
        layer, num_seqs = _full_pool(stage, dtype)
        held[dtype] = num_seqs
        yield figure(f"kv.{name}.sequences", num_seqs, f"of {sequence_length(stage)} tokens")
        seconds, share = _attended(stage, layer, num_seqs)
        yield figure(f"kv.{name}.attention", seconds / num_seqs * 1e6, "us a sequence")
        yield figure(f"kv.{name}.error", share, "of tolerance", at_most=1.0)
        if dtype != stage.dtype:
            judged = stage.goal(HELD_GOAL) if dtype == "fp8_e4m3" else None
            yield figure(f"kv.{name}.gain", num_seqs / held[stage.dtype], "x", at_least=judged)
        del layer


def sequence_length(stage: Stage) -> int:
    """Return the tokens of each sequence."""
    return _SMALL_LENGTH if stage.is_small else _LENGTH


def _full_pool(stage: Stage, dtype: str) -> tuple[LayerPages, int]:
    """Fill a pool with as many whole sequences as its bytes hold in the engine's layout."""
    kv_heads, head_dim = (2, 32) if stage.is_small else (8, 128)
    layout = KVLayout(
        model_fingerprint="",
        dtype=dtype,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=_BLOCK_SIZE,
    )
    blocks_each = sequence_length(stage) // _BLOCK_SIZE
    num_seqs = (_SMALL_POOL_BYTES if stage.is_small else _POOL_BYTES) // (layout.layer_block_bytes * blocks_each)
    cache = PagedKVCache(layout, num_blocks=num_seqs * blocks_each, device=stage.place)
    pages, token_scales = cache.layer(0), cache.layer_scales(0)
    layer = LayerPages(
        pages=pages,
        token_scales=token_scales,
        head_scales=torch.full((2, kv_heads), 0.01, device=stage.place) if dtype == "fp8_e4m3" else None,
    )
    largest = LARGEST_CODE.get(pages.dtype, 2.0)
    step = max(1, (64 << 20) // (pages[0].numel() * 4))  # the float32 numbers of a few blocks at a time
    for begin in range(0, len(pages), step):
        part = torch.rand(pages[begin : begin + step].shape, device=stage.place).sub_(0.5)
        pages[begin : begin + step].copy_(part.mul_(2 * largest))
    if token_scales is not None:
        token_scales.uniform_(0.0, 2 / largest)
    return layer, num_seqs


def _attended(stage: Stage, layer: LayerPages, num_seqs: int) -> tuple[float, float]:
    """Return the seconds of one layer's attention over all sequences, and the error of a few of them."""
    place, length = stage.place, sequence_length(stage)
    dtype = getattr(torch, stage.dtype)
    queries = torch.randn(num_seqs, layer.num_kv_heads * 4, layer.head_dim, device=place).to(dtype)
    tables = torch.randperm(layer.pages.shape[0], device=place).to(torch.int32).view(num_seqs, -1)
    lengths = int32([length] * num_seqs, place)
    out = torch.empty_like(queries)
    # That for any number of sequences.
    launch = decode_launches(stage, attention_shape(layer.head_dim, dtype, layer.pages.dtype))[-1]

    cut = DecodeCut(launch=launch, num_splits=1)

    def call(_number: int) -> None:
        flash_decode(queries, layer, out, tables=tables, lengths=lengths, window=None, cut=cut, workspace=None)

    seconds = seconds_per_call(call, place, calls=2, tries=3)
    some = torch.randint(num_seqs, (_NUM_CHECKED,), device=place)
    starts, counts = int32([length - 1] * _NUM_CHECKED, place), int32([1] * _NUM_CHECKED, place)
    expected = reference.attention(queries[some], layer, tables=tables[some], starts=starts, counts=counts, window=None)
    return seconds, error_share(out[some], expected, _TOLERANCE)
