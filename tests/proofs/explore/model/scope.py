"""How large a world is explored, and the names in it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.layout.lanes import Lane, lanes_between
from kv_transfer.protocol import actions as act
from kv_transfer.protocol.handoff_retry import HandoffRetry
from kv_transfer.protocol.messages import Body, HandoffEnvelope, Prefill, PrefillJob, TransferKey
from kv_transfer.protocol.sender import SenderPlan
from kv_transfer.protocol.settings import TransferSettings
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import NO_BLOCK, BlockHash, BlockId, Incarnation, RequestId, TransferId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams
from tests.proofs.explore.model.freeze import Interned, Machines
from tests.proofs.explore.model.properties import Contents

UNIT_TOKENS = HASH_BLOCK_TOKENS
TAIL = BlockHash(b"right tokens....")
WINDOW_BLOCKS = 500
"""Windowed layers have blocks of their own names, this plus that of the block that goes with them."""
TRANSFER = TransferId("t")
"""Each request's own name in its own life; two lives never see each other's messages."""


class _Sampling(SamplingParams):
    """Hashable, as a value in a state must be: every request here samples alike."""

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The bounds of one exploration."""

    steps: tuple[int, ...] = (1,)
    """Units of the prompt that each step of the prefill worker's engine computes, a layer at a time."""
    num_layers: int = 2
    num_heads: int = 1
    """KV heads of the model, each of which goes from a region of its own to a region of its own."""
    windowed_layers: tuple[int, ...] = ()
    """Layers that are kept apart, in blocks of their own, and attend to nothing but a token itself."""
    chunk_cells: int = 1
    """Most cells in one chunk; a cell is one unit in one layer."""
    units_per_block: int = 1
    """Of the decode worker."""
    units_per_source: int = 1
    """In a block of the prefill workers."""
    spare_blocks: int = 0
    """What a decode worker's pool has beyond the blocks of one request: with none, each is reused as soon as it can be,
    with many, attempts and requests run beside each other."""
    max_faults: int = 2
    """Shared by all requests."""
    max_attempts: int = 1
    max_rewrites: int = 1
    write_window: int = 2
    shared_memory: bool = True
    """Revocation needs the writer's word and DRAINED is a proof (`shm`); else the reverse (`tcp`)."""
    remote: bool = False
    """With `shared_memory`: DRAINED is no proof either, for bytes may still be in the network (RDMA)."""
    mistakes: bool = False
    """Whether a prefill worker may compute another prompt than it was asked for."""
    preempts: bool = False
    """Whether an engine may throw a prompt out between two steps and compute it again into other blocks."""
    fetch: bool = False
    """Whether a held prefix is fetched, of which a prefill worker may have any part, instead of a prompt computed."""
    bent: bool = False
    """Whether messages may arrive with other content than was sent: a peer that is broken, or hostile."""
    only: frozenset[str] | None = None
    """Kinds of faults to explore; None means all."""

    @property
    def num_units(self) -> int:
        return sum(self.steps)

    @property
    def num_cells(self) -> int:
        return self.num_units * self.num_layers * self.num_heads

    @property
    def block_cells(self) -> int:
        """In one block of a decode worker, and the blocks of windowed layers that go with it."""
        return self.units_per_block * self.num_layers * self.num_heads

    @property
    def num_blocks(self) -> int:
        """That the prompt takes on a decode worker."""
        return -(-self.num_units // self.units_per_block)

    @property
    def pool_blocks(self) -> int:
        """Of a decode worker."""
        return self.num_blocks + self.spare_blocks

    @property
    def num_tokens(self) -> int:
        """Of the prompt, whose last unit is not full."""
        return self.num_units * UNIT_TOKENS - 1

    @property
    def layout(self) -> KVLayout:
        """Of every worker, but for its block size."""
        return KVLayout(
            model_fingerprint="m",
            dtype="float32",
            num_layers=self.num_layers,
            num_kv_heads=self.num_heads,
            head_dim=1,
            block_size=UNIT_TOKENS * self.units_per_block,
            tp_size=self.num_heads,
            num_regions=self.num_heads,
            windowed_layers=self.windowed_layers,
            window=1 if self.windowed_layers else 0,
        )

    @property
    def num_lanes(self) -> int:
        return len(lanes_between(self.layout, self.layout))

    def sizes(self, held_tokens: int = 0) -> tuple[HandoffSize, ...]:
        """Of the lanes; one byte stands for a cell."""
        layout = self.layout
        return tuple(
            HandoffSize.of_lane(
                lane,
                layout,
                num_tokens=self.num_tokens,
                held_tokens=held_tokens,
                unit_tokens=UNIT_TOKENS,
                unit_layer_bytes=1,
            )
            for lane in lanes_between(layout, layout)
        )

    @property
    def num_chunks(self) -> int:
        """Most chunks into which one hand-off is cut, however late its reservation comes."""
        return sum(map(self._num_chunks_of, self.sizes()))

    def _num_chunks_of(self, size: HandoffSize) -> int:
        at_once = ChunkPlanner(size, chunk_bytes=self.chunk_cells).plan(self.num_units)
        planner, ready, chunks = ChunkPlanner(size, chunk_bytes=self.chunk_cells), 0, 0
        for units in self.steps:
            for layers in range(1, self.num_layers):
                chunks += len(planner.plan(ready, coming=ready + units, num_layers=layers))
            ready += units
            chunks += len(planner.plan(ready))
        return max(len(at_once), chunks)

    def slots(self, cells: CellRange, blocks: tuple[int, ...], group: int = 0) -> tuple[tuple[int, int], ...]:
        """(block, position in it) of each cell. `group`: of its layers, whose blocks these ought to be."""
        return tuple(
            (
                blocks[unit // self.units_per_block] - group * WINDOW_BLOCKS,
                (unit % self.units_per_block * self.num_layers + layer) * self.num_heads + head,
            )
            for unit in range(cells.first_unit, cells.first_unit + cells.num_units)
            for layer in range(cells.first_layer, cells.first_layer + cells.num_layers)
            for head in range(cells.first_head, cells.first_head + cells.num_heads)
        )

    def needed_content(self) -> Contents:
        """Of each block of the prompt: (position, what the cell there must hold)."""
        sizes, cells = self.sizes(), self.block_cells
        sent = {
            (unit * self.num_layers + layer) * self.num_heads + head
            for size in sizes
            for unit in range(size.first_unit, self.num_units)
            for layer in range(size.first_layer, size.first_layer + size.num_layers)
            for head in range(size.first_head, size.first_head + size.num_heads)
        }
        return tuple(
            tuple((place % cells, place) for place in range(index * cells, (index + 1) * cells) if place in sent)
            for index in range(self.num_blocks)
        )

    def windows(self, blocks: tuple[int, ...], first: int) -> tuple[tuple[BlockId, ...], ...]:
        """Blocks of the windowed layers that go with those, the first of which is block `first` of the prompt."""
        layout = self.layout
        kept = layout.first_window_block(self.num_tokens)
        return tuple(
            tuple(
                BlockId(group * WINDOW_BLOCKS + block) if index >= kept else NO_BLOCK
                for index, block in enumerate(blocks, first)
            )
            for group in range(1, len(layout.groups))
        )

    def __str__(self) -> str:
        transport = ("rdma" if self.remote else "shm") if self.shared_memory else "tcp"
        return (
            f"{self.num_chunks} chunks of {self.num_units} x {self.num_layers} x {self.num_heads} cells, "
            f"{len(self.windowed_layers)} windowed layers, {self.max_faults} faults, "
            f"{self.max_attempts} attempts, pool of {self.pool_blocks}, {transport}"
        )


@dataclass(slots=True, kw_only=True)
class Names:
    """What is numbered, and the caches that all lives share."""

    scope: Scope
    machines: Machines = field(default_factory=Machines)
    envelopes: Interned = field(default_factory=Interned)
    settings: TransferSettings = field(init=False)
    fresh_ladder: int = field(init=False)
    lanes: tuple[Lane, ...] = field(init=False)
    needed: Contents = field(init=False)
    """See `Scope.needed_content`."""

    def __post_init__(self) -> None:
        scope = self.scope
        self.settings = TransferSettings(
            max_rewrites=scope.max_rewrites, write_window=scope.write_window, chunk_bytes=scope.chunk_cells
        )
        num_tokens = scope.num_tokens
        job = PrefillJob(
            transfer_id=TRANSFER,
            request_id=RequestId("r"),
            token_ids=tuple(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            held_tokens=0,
            sampling=_Sampling(),
            hash_root=BlockHash(bytes(16)),
            timeout_s=0.5,
            tail_hash=TAIL,
        )
        if scope.fetch:
            job = replace(job, token_ids=(), tail_hash=None, resume=True, fetch=True, names=self.prefix)
        layout = scope.layout
        self.lanes, self.needed = lanes_between(layout, layout), scope.needed_content()
        ladder = HandoffRetry(job, own=self.decode(0), layout=layout, settings=self.settings)
        self.fresh_ladder = self.machines.add(ladder)

    @property
    def prefix(self) -> tuple[BlockHash, ...]:
        """Names of the units of a prefix that is fetched."""
        return tuple(BlockHash(b"unit %11d" % unit) for unit in range(self.scope.num_units))

    def prefill(self, at: int, epoch: int) -> Incarnation:
        """Of a prefill worker's process."""
        return Incarnation(100 * (at + 1) + epoch)

    def decode(self, epoch: int) -> Incarnation:
        """Of a decode worker's process."""
        return Incarnation(1000 + epoch)

    def at(self, incarnation: Incarnation) -> int:
        """Which prefill worker that is or was."""
        return incarnation // 100 - 1

    def envelope(self, sender: Incarnation, addressee: Incarnation, key: TransferKey | None, body: Body) -> int:
        """Number of a message."""
        return self.envelopes.number(HandoffEnvelope(incarnation=sender, addressee=addressee, key=key, body=body))

    def sender_plan(self, request: HandoffEnvelope) -> SenderPlan:
        """Of the sender that a PREFILL starts."""
        if request.key is None or not isinstance(request.body, Prefill):
            raise TypeError(f"{request} asks for no prefill")
        return SenderPlan(
            key=request.key,
            own=request.addressee,
            peer=request.incarnation,
            job=request.body.job,
            block_size=UNIT_TOKENS * self.scope.units_per_source,
            unit_tokens=UNIT_TOKENS,
            whole_tokens=UNIT_TOKENS * max(self.scope.units_per_source, self.scope.units_per_block),
            lanes=self.scope.sizes(request.body.job.held_tokens),
            lease_s=self.settings.lease_s,
            stall_s=self.settings.stall_s,
            queue_s=self.settings.queue_s,
            chunk_bytes=self.settings.chunk_bytes,
            write_window=self.settings.write_window,
            max_rewrites=self.settings.max_rewrites,
        )

    def compiled(self, actions: act.Actions, envelope: Callable[[Body], int]) -> list[tuple[str, Any]]:
        """Actions by name; messages by number."""
        return [
            ("Send", envelope(action.body)) if isinstance(action, act.SendMessage) else (type(action).__name__, action)
            for action in actions
        ]
