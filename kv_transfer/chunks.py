"""How a prompt's blocks are cut into chunks: what one write moves and one checksum covers."""

from kv_transfer.messages import CellRange
from tandem.kv_layout import KVLayout


class ChunkPlanner:
    """Plans each block once, in order, in chunks of at most `chunk_blocks` blocks over all layers and heads."""

    __slots__ = ("_chunk_blocks", "_layout", "_num_planned")

    def __init__(self, *, layout: KVLayout, chunk_blocks: int) -> None:
        self._layout = layout
        self._chunk_blocks = chunk_blocks
        self._num_planned = 0

    def plan(self, num_ready: int) -> list[CellRange]:
        """Chunks for the blocks that became ready: those from the last call's `num_ready` up to this one's."""
        chunks = []
        while self._num_planned < num_ready:
            size = min(self._chunk_blocks, num_ready - self._num_planned)
            chunks.append(
                CellRange(
                    first_layer=0,
                    num_layers=self._layout.num_planes,
                    first_block=self._num_planned,
                    num_blocks=size,
                    first_head=self._layout.tp_rank * self._layout.num_local_kv_heads,
                    num_heads=self._layout.num_local_kv_heads,
                )
            )
            self._num_planned += size
        return chunks


def blocks_per_chunk(layout: KVLayout, chunk_bytes: int) -> int:
    """Blocks that fit into `chunk_bytes`, at least one."""
    return max(1, chunk_bytes // layout.worker_block_bytes)
