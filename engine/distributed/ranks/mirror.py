"""Keeps rank 0's copy of the parts of the KV pool that ranks of other nodes have, on demand, over the ranks' links.

Other workers read and write KV in rank 0's memory alone. Before a peer reads a block, it is fetched from the other
nodes; before a step reads a block that came from a peer, it is sent to them. Both happen between two steps, on the
engine's thread, in the same order as all other commands, so no rank ever sees half a copy.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.ranks.messages import PoolPlan
from engine.distributed.wire.mirror_state import MirrorState
from engine.distributed.wire.mirrored_blocks import Planes, encode_blocks, read_blocks, write_blocks
from engine.types.request import Batch
from engine.types.step_inputs import IntArray, StepInputs

_MESSAGE_BYTES = 32 << 20


class Mirror:
    """Mirror of one pool, for as long as it is served. Used by the engine's thread."""

    def __init__(self, channels: Mapping[int, RankChannel], plan: PoolPlan, memory: memoryview) -> None:
        """`channels`: to the ranks of other nodes; `memory`: the whole pool here, the ranks' parts side by side."""
        self._channels = channels
        self._state = MirrorState(plan.num_blocks)
        self._planes = {rank: _planes(plan, memory, rank) for rank in channels}
        self._block_size = plan.layout.block_size
        self._most_blocks = max(1, _MESSAGE_BYTES // plan.layout.block_bytes)

    @property
    def most_blocks(self) -> int:
        """Most blocks that are copied at once: takes some milliseconds between two steps."""
        return self._most_blocks

    def mark_received(self, blocks: Sequence[int]) -> None:
        """Record that a peer writes these blocks from now on."""
        self._state.mark_received(blocks)

    def send_missing(self, inputs: StepInputs) -> None:
        """Send to the other nodes the blocks that this step reads and they lack. Raises RankLost."""
        for blocks in self._portions(self._state.step(inputs)):
            for rank, channel in self._channels.items():
                channel.send(ChannelKind.PLACE, encode_blocks(blocks) + read_blocks(self._planes[rank], blocks))

    def fetch_prompt_blocks(self, batch: Batch) -> None:
        """Fetch the prompts' blocks that this batch has computed, which peers may read next. Raises RankLost."""
        blocks = [
            block
            for request, start, num_tokens, *_ in batch.items
            if request.prefill_only
            for block in request.block_table.ids[: -(-(start + num_tokens) // self._block_size)]
        ]
        if blocks:
            self.fetch_stale(blocks)

    def fetch_stale(self, blocks: Sequence[int]) -> None:
        """Fetch those of these blocks whose content is newer on other nodes. Raises RankLost."""
        for portion in self._portions(self._state.stale(blocks)):
            # Ask all before reading the first answer, so that they copy at the same time.
            for channel in self._channels.values():
                channel.send(ChannelKind.FETCH, encode_blocks(portion))
            for rank, channel in self._channels.items():
                payload, _ = channel.expect(ChannelKind.BLOCKS)
                write_blocks(self._planes[rank], portion, payload)

    def _portions(self, blocks: IntArray) -> Iterator[IntArray]:
        for begin in range(0, len(blocks), self._most_blocks):
            yield blocks[begin : begin + self._most_blocks]


def _planes(plan: PoolPlan, memory: memoryview, rank: int) -> Planes:
    part = memory[rank * plan.rank_bytes : (rank + 1) * plan.rank_bytes]
    return np.frombuffer(part, dtype=np.uint8).reshape(plan.layout.planes_per_rank, plan.num_blocks, -1)
