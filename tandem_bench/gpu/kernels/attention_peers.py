"""Attention of other libraries at the same shapes: torch's fused kernel over contiguous keys, FlashInfer over pages."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from engine.kernels.triton.pages import LayerPages
from tandem_bench.gpu.timing import Numbered

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paged:
    """Attention over the pages of several layers: `num_seqs` sequences with `rows` rows each at the end of `length`
    keys.
    """

    queries: Tensor  # [num_seqs * rows, num_heads, head_dim]
    layers: tuple[LayerPages, ...]
    tables: Tensor  # int32 [num_seqs, num_blocks]
    num_seqs: int
    rows: int
    length: int

    @property
    def device(self) -> torch.device:
        return self.queries.device


def sdpa(case: Paged) -> dict[str, Numbered]:
    """Return ways to call torch, over keys gathered in advance at no cost."""
    num_heads, head_dim = case.queries.shape[1:]
    kv_heads = case.layers[0].num_kv_heads
    keys = [_contiguous(case, layer, 0) for layer in case.layers]  # [num_seqs, num_kv_heads, length, head_dim]
    values = [_contiguous(case, layer, 1) for layer in case.layers]
    queries = case.queries.view(case.num_seqs, case.rows, num_heads, head_dim).transpose(1, 2).contiguous()
    if case.rows == 1:
        # The query heads of one key-value head as rows of one call: keys are read once for all of them.
        grouped = queries.view(case.num_seqs, kv_heads, -1, head_dim)
        return {
            "sdpa": lambda i: F.scaled_dot_product_attention(
                queries, keys[i % len(keys)], values[i % len(keys)], enable_gqa=True
            ),
            "sdpa-grouped": lambda i: F.scaled_dot_product_attention(
                grouped, keys[i % len(keys)], values[i % len(keys)]
            ),
        }
    mask: dict[str, Any] = (
        {"is_causal": True} if case.rows == case.length else {"attn_mask": causal_lower_right(case.rows, case.length)}
    )
    return {
        "sdpa": lambda i: F.scaled_dot_product_attention(
            queries, keys[i % len(keys)], values[i % len(keys)], enable_gqa=True, **mask
        )
    }


def flash_infer(case: Paged) -> dict[str, Numbered]:
    """Return the call of FlashInfer, or nothing where it is not installed. Its "HND" pages have our layout."""
    if importlib.util.find_spec("flashinfer") is None or case.device.type != "cuda":
        return {}
    library: Any = importlib.import_module("flashinfer")
    place, layer = case.device, case.layers[0]
    blocks = -(-case.length // layer.block_size)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=place)
    seqs = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=place)
    last = torch.full((case.num_seqs,), (case.length - 1) % layer.block_size + 1, dtype=torch.int32, device=place)
    pages = (seqs * blocks, case.tables[:, :blocks].reshape(-1).contiguous(), last)
    heads = (case.queries.shape[1], layer.num_kv_heads, layer.head_dim, layer.block_size)
    dtypes = {"q_data_type": case.queries.dtype, "kv_data_type": layer.pages.dtype}
    if case.rows == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(seqs * case.rows, *pages, *heads, causal=True, **dtypes)
    return {"flashinfer": lambda i: wrapper.run(case.queries, case.layers[i % len(case.layers)].pages)}


def relative_difference(one: Tensor, call: Callable[[int], object], case: Paged) -> float:
    """Return the difference of our first layer and a peer's, relative to the largest value."""
    other = call(0)
    if not isinstance(other, Tensor):
        raise TypeError(f"a peer returned {type(other).__name__}")
    num_heads, head_dim = case.queries.shape[1:]
    if other.dim() == 4 and other.shape[1] == num_heads:
        other = other.transpose(1, 2)
    apart = (other.reshape(-1, num_heads, head_dim).float() - one.float()).abs().max()
    return float(apart / one.float().abs().max())


def _contiguous(case: Paged, layer: LayerPages, which: int) -> Tensor:
    blocks = -(-case.length // layer.block_size)
    pages = layer.pages[case.tables[:, :blocks].long(), which]  # [num_seqs, blocks, num_kv_heads, block_size, head_dim]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, : case.length].contiguous()
