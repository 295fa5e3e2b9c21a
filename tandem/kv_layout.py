"""Geometry of a KV cache: what two workers must agree on before any block moves between them.

A block's payload is head-major, `[layer, block, k/v, kv_head, token, head_dim]`, so that one head of one block
is contiguous and any tensor-parallel slice is a list of contiguous ranges.
"""

from dataclasses import dataclass, fields

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One worker's KV geometry."""

    model_fingerprint: str
    """Digest of the model's configuration and weights' revision; never a path."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    """Of the whole model, not of one rank."""
    head_dim: int
    block_size: int
    """Tokens per physical block."""
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def num_local_kv_heads(self) -> int:
        """KV heads held by this rank (replicated when there are fewer heads than ranks)."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer: K and V of all local heads."""
        per_head = self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.num_local_kv_heads * per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of one rank."""
        return self.num_layers * self.layer_block_bytes

    @property
    def num_planes(self) -> int:
        """Layers of all ranks: in a pool that they share they lie one rank after another, each as one layer's heads."""
        return self.tp_size * self.num_layers

    @property
    def worker_block_bytes(self) -> int:
        """Bytes of one block over all layers of all ranks."""
        return self.num_planes * self.layer_block_bytes

    def mismatch(self, other: "KVLayout") -> str | None:
        """Name and values of the first field that forbids a hand-off between the two, or None."""
        for f in fields(self):
            if f.name == "tp_rank":
                continue
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"{f.name}: {mine} here, {theirs} there"
        return None
