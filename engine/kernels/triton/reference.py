"""References in plain torch for all kernels: slow and obvious; tests and the GPU suite compare with them.

Arguments are the launchers'; sums are computed in float32 (float64 for float32 inputs would hide nothing here).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton.pages import LayerPages
from engine.kv_storage.kv_codes import LARGEST_CODE, SMALLEST_PEAK, head_codes, token_codes
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.norm import HeadNorm
from tandem.values.kv_layout import KVLayout


def attention(
    queries: Tensor,
    layer: LayerPages,
    *,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int | None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend `[num_rows, num_heads, head_dim]`: sequences one after another, `counts` rows each from `starts`.

    Returns float32 `[num_rows, num_heads, head_dim]`; zeros for rows of no sequence.
    """
    out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
    row = 0
    for table, start, count in zip(tables, starts.tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        keys, values = gathered(layer, table, start + count)  # [num_kv_heads, num_keys, head_dim]
        group = queries.shape[1] // layer.num_kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        position = torch.arange(start, start + count, device=queries.device)[:, None]
        key = torch.arange(start + count, device=queries.device)[None, :]
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        rows = queries[row : row + count].float().transpose(0, 1)
        scores = rows @ keys.transpose(1, 2) * (layer.head_dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[row : row + count] = (weights @ values).transpose(0, 1)
        row += count
    return out


def gathered(layer: LayerPages, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values, float32 `[num_kv_heads, length, head_dim]` each."""
    blocks = table[: -(-length // layer.block_size)].long()
    pages = layer.pages[blocks].float()  # [num_used, 2, num_kv_heads, block_size, head_dim]
    if layer.token_scales is not None:
        pages = pages * layer.token_scales[blocks][..., None]
    if layer.head_scales is not None:
        pages = pages * layer.head_scales[..., None, None]
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values


def stored(values: Tensor, dtype: torch.dtype) -> LayerPages:
    """A layer that holds finite `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, laid out as the engine's cache.

    In fp8_e4m3 each head's scale maps its largest magnitude to the largest code.
    """
    if dtype not in LARGEST_CODE:
        return LayerPages(pages=values.to(dtype))
    if dtype is torch.float8_e4m3fn:
        scales = (values.abs().amax((0, 3, 4)) / LARGEST_CODE[dtype]).clamp_min(SMALLEST_PEAK)
        return LayerPages(pages=head_codes(values, scales[..., None]), head_scales=scales)
    num_blocks, _, num_kv_heads, block_size, head_dim = values.shape
    layout = KVLayout(
        model_fingerprint="",
        dtype="int8",
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    cache = PagedKVCache(layout, num_blocks=num_blocks, device=values.device)
    layer = LayerPages(pages=cache.layer(0), token_scales=cache.layer_scales(0))
    codes, token_scales = token_codes(values)
    layer.pages.copy_(codes)
    if layer.token_scales is not None:
        layer.token_scales.copy_(token_scales)
    return layer


def copied(layer: LayerPages) -> LayerPages:
    """A copy of the layer in memory of its own."""

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone()

    return LayerPages(
        pages=layer.pages.clone(), token_scales=copy(layer.token_scales), head_scales=copy(layer.head_scales)
    )


def rope_kv(qkv: Tensor, layer: LayerPages, *, cos: Tensor, sin: Tensor, slots: Tensor, norm: HeadNorm | None) -> None:
    """Norm, rotate and store in place, as the launcher does."""
    heads = qkv.to(torch.float32, copy=True).view(qkv.shape[0], -1, layer.head_dim)
    num_kept = heads.shape[1] - layer.num_kv_heads
    num_queries = num_kept - layer.num_kv_heads
    if norm is not None:
        weight = torch.cat(
            [norm.query.float().expand(num_queries, -1), norm.key.float().expand(layer.num_kv_heads, -1)]
        )
        heads[:, :num_kept] = F.rms_norm(heads[:, :num_kept], (layer.head_dim,), None, norm.eps) * weight
    low, high = heads[:, :num_kept].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    heads[:, :num_kept] = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    qkv[:, : num_queries * layer.head_dim] = heads[:, :num_queries].flatten(1).to(qkv.dtype)
    fresh = heads[:, num_queries:].view(len(qkv), 2, layer.num_kv_heads, layer.head_dim).nan_to_num(0.0, 0.0, 0.0)
    used = slots >= 0
    block, offset = slots[used] // layer.block_size, slots[used] % layer.block_size
    if layer.token_scales is not None:
        codes, layer.token_scales[block, :, :, offset] = token_codes(fresh[used])
        layer.pages[block, :, :, offset] = codes
    elif layer.head_scales is not None:
        codes = head_codes(fresh[used], layer.head_scales)
        # As bytes: eight-bit floats have no indexed assignment.
        layer.pages.view(torch.uint8)[block, :, :, offset] = codes.view(torch.uint8)
    else:
        layer.pages[block, :, :, offset] = fresh[used].to(layer.pages.dtype)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add in place. Returns the norm."""
    if delta is not None:
        residual += delta
    return (F.rms_norm(residual.float(), tuple(weight.shape), None, eps) * weight.float()).to(residual.dtype)


def silu_mul(stacked: Tensor) -> Tensor:
    """Gate a stacked projection; the result is rounded once."""
    gate, up = stacked.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(stacked.dtype)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in units of their largest magnitude over 127, ties to even: int8 codes, and float32 scales `[num_rows]`.

    A row below 1e-30 is zeros.
    """
    values = x.float()
    largest = values.abs().amax(dim=1)
    most = torch.full_like(largest, 127.0)  # a tensor: torch multiplies by the reciprocal of a number
    factor = torch.where(largest > SMALLEST_PEAK, most / largest.clamp_min(SMALLEST_PEAK), 0.0)
    return (values * factor[:, None]).round().clamp(-127.0, 127.0).to(torch.int8), largest / most


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer, summed in float32."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
