"""Geometry of a KV cache: what two workers must agree on before any block moves between them.

A block's payload is head-major, `[layer, block, k/v, kv_head, token, head_dim]`, so that one head of one block
is contiguous and any tensor-parallel slice is a list of contiguous ranges. In int8 and int4 the scales of a block,
`[k/v, kv_head, token]` of `scale_bytes` each, follow its codes within the payload, so that code that moves blocks moves
both without knowing of either; fp8_e4m3 has scales that belong to the model, and none in its blocks.

Layers that attend to a window may be kept apart from those that attend to everything, so that what precedes the window
can be given up. Then a pool has as many planes as the model has layers that attend to everything, and a block holds one
*group* of layers: these, or as many of the windowed ones. All groups have blocks of one size, from one pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8_e4m3": 8, "int4": 4}
"""Bits of a value, or of its code."""
QUANTISED_DTYPES = ("int8", "fp8_e4m3", "int4")
"""Dtypes of a cache that are independent of the model's dtype."""
AUTO_DTYPE = "auto"
"""Placeholder for a dtype: of a cache the one that the model computes in, of a model its checkpoint's."""
EXACT_DTYPE = "float32"
"""Dtype in which a sampled token does not depend on the batch that it is computed in."""

INT4_GROUP = 64
"""Values of a head that share a step and a minimum in int4; the last ones of a head may be fewer."""

_SCALE_BYTES = 4
"""Bytes of a float32, or of a step and a minimum in bfloat16."""
_ALIGNMENT = 64


def code_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one token of one head of K or V, without scales."""
    return -(-head_dim * DTYPE_BITS[dtype] // 8)


def scale_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of scales that are stored for each token and head of K or V; 0 where there are none."""
    if dtype == "int4":
        return -(-head_dim // INT4_GROUP) * _SCALE_BYTES
    return _SCALE_BYTES if dtype == "int8" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One worker's KV geometry."""

    model_fingerprint: str
    """Digest of the model's configuration and weights' revision; never a path."""
    dtype: str
    """Dtype of cached keys and values: one of DTYPE_BITS."""
    num_layers: int
    num_kv_heads: int
    """Number in the whole model, not of one rank."""
    head_dim: int
    block_size: int
    """Tokens per physical block."""
    tp_size: int = 1
    tp_rank: int = 0
    num_regions: int = 1
    """Number of memories that hold the ranks' KV, consecutive ranks in each and as many: 1, or one per process."""
    windowed_layers: tuple[int, ...] = ()
    """Layers that are kept apart from the others, ascending; empty: a block holds all layers."""
    window: int = 0
    """Latest tokens, itself included, that a token attends to in these layers; 0 where there are none."""

    @property
    def num_local_kv_heads(self) -> int:
        """KV heads held by this rank (replicated when there are fewer heads than ranks)."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are codes."""
        return self.dtype in QUANTISED_DTYPES

    @property
    def scale_offset(self) -> int | None:
        """Offset in bytes of the tokens' scales in one block of one layer; None when it has none."""
        return _round_up(self._code_bytes) if scale_bytes(self.dtype, self.head_dim) else None

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer: K and V of all local heads, with their scales; padded to 64 if there are
        scales."""
        if self.scale_offset is None:
            return self._code_bytes
        return _round_up(self.scale_offset + self._num_vectors * scale_bytes(self.dtype, self.head_dim))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each group: those that attend to everything, then the windowed ones; one group of all if none is
        kept apart.
        """
        return _groups(self.num_layers, self.windowed_layers)

    @property
    def layer_order(self) -> tuple[int, ...]:
        """The model's layers in the order of their groups: the order in which cells of a hand-off number them."""
        return tuple(layer for group in self.groups for layer in group)

    def first_window_block(self, num_tokens: int) -> int:
        """First token block whose windowed layers a sequence of `num_tokens` tokens keeps.

        The token after its last full block but for its last token attends to it: there the next request with the same
        tokens, of which one is always computed, finds its prefix.
        """
        return first_window_block(num_tokens, window=self.window, block_size=self.block_size)

    @property
    def planes_per_rank(self) -> int:
        """Layers of one block: those of the largest group."""
        return max(map(len, self.groups))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over its layers, of one rank."""
        return self.planes_per_rank * self.layer_block_bytes

    @property
    def num_planes(self) -> int:
        """Number of planes: in a pool that ranks share, each layer of a block of each rank is one, one rank after
        another.
        """
        return self.tp_size * self.planes_per_rank

    @property
    def worker_block_bytes(self) -> int:
        """Bytes of one block over its layers, of all ranks."""
        return self.num_planes * self.layer_block_bytes

    @property
    def ranks_per_region(self) -> int:
        """Number of ranks whose KV is in one region."""
        return self.tp_size // self.num_regions

    @property
    def region_block_bytes(self) -> int:
        """Bytes of one block over all layers of the ranks of one region."""
        return self.worker_block_bytes // self.num_regions

    def mismatch(self, other: "KVLayout") -> str | None:
        """Name and values of the first field that forbids a hand-off between the two, or None."""
        for f in fields(self):
            if f.name == "tp_rank":
                continue
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"{f.name}: {mine} here, {theirs} there"
        return None

    @property
    def _num_vectors(self) -> int:
        """Tokens of heads of K and V in one block of one layer."""
        return 2 * self.num_local_kv_heads * self.block_size

    @property
    def _code_bytes(self) -> int:
        return self._num_vectors * code_bytes(self.dtype, self.head_dim)


def first_window_block(num_tokens: int, *, window: int, block_size: int) -> int:
    """See `KVLayout.first_window_block`."""
    return window_start(max(0, num_tokens - 1) // block_size * block_size, window=window) // block_size


def window_start(num_tokens: int, *, window: int) -> int:
    """First of `num_tokens` tokens that the token after them attends to."""
    return max(0, num_tokens + 1 - window)


def windows_worth_keeping_apart(windows: Sequence[int | None], max_context: int) -> tuple[tuple[int, ...], int]:
    """Windowed layers and their greatest window, for KVLayout; no layers where nothing could be given up.

    `windows`: of each layer; None: it attends to everything. Where all layers have windows, they stay together.
    """
    layers = tuple(layer for layer, window in enumerate(windows) if window is not None)
    window = max((window for window in windows if window is not None), default=0)
    if not 0 < len(layers) < len(windows) or window >= max_context:
        return (), 0
    return layers, window


@lru_cache(maxsize=64)  # asked for with every block that moves, and of a few models
def _groups(num_layers: int, windowed: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    whole = tuple(sorted(set(range(num_layers)) - set(windowed)))
    if not windowed:
        return (whole,)
    num_groups = -(-len(windowed) // len(whole))
    edges = [len(windowed) * i // num_groups for i in range(num_groups + 1)]
    return (whole, *(windowed[begin:end] for begin, end in pairwise(edges)))


def may_differ_after_failover(dtype: str, *, deterministic: bool) -> bool:
    """Whether a text that continues on another worker may differ from what the first would have generated.

    In 16 bits the rounding of a token depends on the batch and the chunks that it is computed in.
    """
    return dtype != EXACT_DTYPE and not deterministic


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
