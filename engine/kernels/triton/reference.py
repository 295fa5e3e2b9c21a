"""What each kernel computes, in plain torch: slow, obvious, and what tests and the GPU suite compare with.

Arguments are the launchers'; sums are made in float32 (float64 for float32 inputs would hide nothing here).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton.pages import LARGEST_CODE, LayerPages
from engine.layers.norm import HeadNorm

_NO_SCALE_BELOW = 1e-30


def attention(
    queries: Tensor,
    layer: LayerPages,
    *,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int | None,
) -> Tensor:
    """Every row of `[num_rows, num_heads, head_dim]`: sequences one after another, `counts` rows each from `starts`.

    Float32 `[num_rows, num_heads, head_dim]`; zeros for rows of nobody.
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
        scores = rows @ keys.transpose(1, 2) / math.sqrt(layer.head_dim)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[row : row + count] = (weights @ values).transpose(0, 1)
        row += count
    return out


def gathered(layer: LayerPages, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values, float32 `[num_kv_heads, length, head_dim]` each."""
    blocks = table[: -(-length // layer.block_size)].long()
    pages = layer.pages[blocks].float()  # [num_used, 2, num_kv_heads, block_size, head_dim]
    if layer.scales is not None:
        pages = pages * layer.scales[blocks][..., None]
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values


def quantised(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `[..., head_dim]` and float32 scales `[...]`: the largest magnitude gets the largest code."""
    largest = LARGEST_CODE[dtype]
    peak = values.abs().amax(-1)
    factor = torch.where(peak > _NO_SCALE_BELOW, largest / peak.clamp_min(_NO_SCALE_BELOW), torch.zeros_like(peak))
    codes = (values * factor[..., None]).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), peak / largest


def rope_kv(qkv: Tensor, layer: LayerPages, *, cos: Tensor, sin: Tensor, slots: Tensor, norm: HeadNorm | None) -> None:
    """In place, as the launcher does."""
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
    if layer.scales is None:
        layer.pages[block, :, :, offset] = fresh[used].to(layer.pages.dtype)
        return
    codes, scales = quantised(fresh[used], layer.pages.dtype)
    # Eight-bit floats have few operators, indexed assignment not among them; their bytes do.
    layer.pages.view(torch.uint8)[block, :, :, offset] = codes.view(torch.uint8)
    layer.scales[block, :, :, offset] = scales


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds in place; the norm."""
    if delta is not None:
        residual += delta
    return (F.rms_norm(residual.float(), tuple(weight.shape), None, eps) * weight.float()).to(residual.dtype)


def silu_mul(stacked: Tensor) -> Tensor:
    """The gated half, rounded once."""
    gate, up = stacked.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(stacked.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 sums."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
