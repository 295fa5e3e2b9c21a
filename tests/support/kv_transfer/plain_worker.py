"""A worker's pool as nested arrays, and a prompt's cells put there one rank, head and token at a time by indexing."""

import numpy as np

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import TokenBlocks
from tandem.values.kv_layout import DTYPE_BITS, KVLayout


def _row_bytes(kv: KVLayout) -> int:
    """Of one token's values or codes in one head."""
    return -(-kv.head_dim * DTYPE_BITS[kv.dtype] // 8)


def _scale_bytes(kv: KVLayout) -> int:
    """Of one token's scales in one head."""
    return {"int8": 4, "int4": 4 * -(-kv.head_dim // 64)}.get(kv.dtype, 0)


def layout(dtype="bfloat16", *, tp=1, block_size=16, heads=2, layers=2, head_dim=4, model="m"):
    return KVLayout(
        model_fingerprint=model,
        dtype=dtype,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        tp_size=tp,
    )


def cells(kv: KVLayout, first_unit: int, num_units: int, **others: int) -> CellRange:
    """These units in all layers and heads, unless `others` say which."""
    whole = {"first_layer": 0, "num_layers": kv.num_layers, "first_head": 0, "num_heads": kv.num_kv_heads}
    return CellRange(**whole | others, first_unit=first_unit, num_units=num_units)


def splits(tp, heads):
    """Whether so many heads can be held by so many ranks."""
    return heads % tp == 0 or tp % heads == 0


class Prompt:
    """Random bytes for every cell: `[layer, k/v, head, token, byte]`, and its scale's."""

    def __init__(self, kv: KVLayout, num_tokens: int, rng: np.random.Generator):
        shape = (kv.num_layers, 2, kv.num_kv_heads, num_tokens)
        self.cells = rng.integers(0, 256, (*shape, _row_bytes(kv)), np.uint8)
        self.scales = rng.integers(0, 256, (*shape, _scale_bytes(kv)), np.uint8)


class PlainWorker:
    """`region` begins as noise, so that a byte written in passing shows."""

    def __init__(self, kv: KVLayout, *, pool_blocks: int, num_tokens: int, rng: np.random.Generator):
        self.kv = kv
        self.heads = max(1, kv.num_kv_heads // kv.tp_size)
        self.blocks = [int(b) for b in rng.permutation(pool_blocks)[: -(-num_tokens // kv.block_size)]]
        slots = 2 * self.heads * kv.block_size
        row, self.scale_bytes = _row_bytes(kv), _scale_bytes(kv)
        self.scales_at = -(-slots * row // 64) * 64
        size = -(-(self.scales_at + slots * self.scale_bytes) // 64) * 64 if self.scale_bytes else slots * row
        self.row, self.values_end = row, slots * row
        self.region = rng.integers(0, 256, (kv.tp_size, kv.num_layers, pool_blocks, size), np.uint8)

    def at(self, held_tokens: int = 0, first_token: int = 0) -> TokenBlocks:
        """Its blocks from the one that holds `first_token` on, of a hand-off behind `held_tokens`."""
        first = first_token // self.kv.block_size
        return TokenBlocks(
            blocks=tuple(self.blocks[first:]),
            first_block=first,
            held_tokens=held_tokens,
            pool_blocks=self.region.shape[2],
        )

    def ranks_of(self, head: int) -> list[int]:
        """Who holds it, by counting through the ranks."""
        copies = self.kv.tp_size * self.heads // self.kv.num_kv_heads
        held = [
            h
            for group in range(0, self.kv.num_kv_heads, self.heads)
            for h in [range(group, group + self.heads)] * copies
        ]
        return [rank for rank, heads in enumerate(held) if head in heads]

    def filled(self, prompt: Prompt, first: int, end: int) -> np.ndarray:
        """The region with tokens `[first, end)` of the prompt in every rank that holds them."""
        return self.put(self.region.copy(), prompt.cells, prompt.scales, first, end)

    def touched(self, first: int, end: int) -> np.ndarray:
        """1 for each byte of the region that those tokens have."""
        shape = (self.kv.num_layers, 2, self.kv.num_kv_heads, len(self.blocks) * self.kv.block_size)
        ones = np.ones((*shape, self.row), np.uint8), np.ones((*shape, self.scale_bytes), np.uint8)
        return self.put(np.zeros_like(self.region), *ones, first, end)

    def put(self, region, cells, scales, first, end):
        """Into a region of as many layers as the cells are of; returns it."""
        tokens = np.arange(first, end)
        size = self.kv.block_size
        where, offset = np.array(self.blocks)[tokens // size], tokens % size
        shape = (*region.shape[:3], 2, self.heads, size)
        parts = [(region[..., : self.values_end].reshape(*shape, self.row, copy=False), cells)]
        if row := self.scale_bytes:
            end_of_scales = self.scales_at + 2 * self.heads * size * row
            parts.append((region[..., self.scales_at : end_of_scales].reshape(*shape, row, copy=False), scales))
        for view, values in parts:
            for head in range(self.kv.num_kv_heads):
                for rank in self.ranks_of(head):
                    # [token, layer, k/v, byte]: numpy puts what is indexed by arrays in front.
                    view[rank][:, where, :, head % self.heads, offset] = values[:, :, head, tokens].transpose(
                        2, 0, 1, 3
                    )
        return region
