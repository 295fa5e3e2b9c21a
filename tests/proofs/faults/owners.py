"""What the workers of a batch do for their hand-offs: one only fills blocks, the other only compares them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import FirstToken, PrefillJob
from kv_transfer.session.sender_hub import SenderHub
from tandem.errors import ServingError
from tandem.values.ids import NO_BLOCK, BlockId, TransferId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import PhaseTimes, SampledToken
from tests.proofs.faults.content import Content, placed
from tests.proofs.faults.plan import TransferPlan
from tests.proofs.faults.pools import GuardedPool


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One hand-off as the decode worker's owner has it."""

    plan: TransferPlan
    content: Content
    held_tokens: int
    """Grows with what lands."""
    blocks: list[BlockId] = field(default_factory=list)
    """Landed or committed: verified, and ours."""
    tokens: int = 0
    committed: bool = False
    over: bool = False
    errors: list[ServingError] = field(default_factory=list)
    num_failures_seen: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeOwner:
    """See ReceiverOwner. Compares what lands with what was computed, byte for byte."""

    def __init__(self, pool: GuardedPool, kv: KVLayout) -> None:
        self.pool, self.kv = pool, kv
        self.records: dict[TransferId, Record] = {}
        self.beside: dict[BlockId, list[BlockId]] = {}
        """Of each destination, those of the groups of windowed layers that go with it, or none before the window."""
        self.quarantined: set[BlockId] = set()
        self.num_quarantined = 0
        """Ever."""
        self.violations: list[str] = []

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        record = self.records[transfer_id]
        first = first_sent(self.kv, record.plan.num_tokens, record.held_tokens)
        blocks, *windows = take_for_groups(self.pool, self.kv, num_blocks, min(first, num_blocks))
        for block, *beside in zip(blocks, *windows, strict=True):
            self.beside[block] = [other for other in beside if other != NO_BLOCK]
        return BlocksBound(blocks=blocks, windows=tuple(windows))

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        record = self.records[transfer_id]
        record.tokens += 1
        if record.tokens > 1 or first_token.token.token_id != record.plan.seed % 1000:
            self.violations.append(f"{transfer_id}: another first token, or a second one")

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        record = self.records[transfer_id]
        if record.over:
            self.violations.append(f"{transfer_id}: committed after its end")
        self._take_in(record, info.blocks)
        missing = record.plan.num_tokens - record.held_tokens
        if missing > 0:
            self.violations.append(f"{transfer_id}: committed without its last {missing} tokens")
        record.committed = record.over = True
        record.changed.set()

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        record = self.records[transfer_id]
        if record.over:
            self.violations.append(f"{transfer_id}: failed after its end")
        if not error.message or "internal error" in error.message:
            self.violations.append(f"{transfer_id}: failed without a clear reason: {error.message!r}")
        self._take_in(record, landed)
        record.errors.append(error)
        record.changed.set()

    def expired(self, transfer_id: TransferId) -> None:
        self.violations.append(f"{transfer_id}: expired while somebody was about to try again")

    def quarantine(self, _transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self.quarantined |= set(blocks)
        self.num_quarantined += len(blocks)

    def released(self, _transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self.quarantined -= set(blocks)
        self._give(blocks)

    def end(self, transfer_id: TransferId) -> None:
        """Cancelled: what has landed stays until the batch is at rest, as cache does."""
        self.records[transfer_id].over = True
        self.records[transfer_id].changed.set()

    def give_back(self) -> None:
        """At rest: nothing has changed since it was verified; it goes."""
        for record in self.records.values():
            self._compare(record, record.blocks, record.plan.held_tokens, "at rest")
            self._give(record.blocks)
            record.blocks = []

    def _give(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self.pool.give([block, *self.beside.pop(block, ())])

    def _take_in(self, record: Record, blocks: tuple[BlockId, ...]) -> None:
        self._compare(record, blocks, record.held_tokens, "committed")
        record.blocks += blocks
        record.held_tokens += len(blocks) * self.kv.block_size

    def _compare(self, record: Record, blocks: "tuple[BlockId, ...] | list[BlockId]", held: int, when: str) -> None:
        first = first_sent(self.kv, record.plan.num_tokens, held)
        end = min(record.content.num_tokens, held + len(blocks) * self.kv.block_size)
        for group in range(len(self.kv.groups)):
            chosen = [self.beside[block][group - 1] for block in blocks[first:]] if group else list(blocks)
            if not chosen:
                continue
            begin = held + first * self.kv.block_size if group else held
            expected = placed(self.kv, record.content.destination, self.pool.guard(chosen), begin, end, group=group)
            found = self.pool.at(chosen)
            if not np.array_equal(found, expected):
                num_wrong = int((found != expected).sum())
                self.violations.append(f"{record.plan.name}: {num_wrong} wrong bytes {when}")


def first_sent(kv: KVLayout, num_tokens: int, held_tokens: int) -> int:
    """First block after the held prefix whose windowed layers are sent."""
    if not kv.windowed_layers:
        return 0
    return max(0, kv.first_window_block(num_tokens) - held_tokens // kv.block_size)


def take_for_groups(pool: GuardedPool, kv: KVLayout, num_blocks: int, first: int) -> list[tuple[BlockId, ...]]:
    """Blocks of each group of layers: of windowed ones from the `first` on."""
    num_windows = num_blocks - first
    taken = pool.take(num_blocks + (len(kv.groups) - 1) * num_windows)
    windows = [taken[begin : begin + num_windows] for begin in range(num_blocks, len(taken), max(1, num_windows))]
    nothing = (NO_BLOCK,) * first
    return [taken[:num_blocks], *((*nothing, *window) for window in windows or [()] * (len(kv.groups) - 1))]


class PrefillOwner:
    """See SenderOwner. Computes step by step, and sometimes tells of layers within a step."""

    def __init__(self, pool: GuardedPool, kv: KVLayout, record_of: Callable[[TransferId], Record]) -> None:
        self.pool, self.kv, self.record_of = pool, kv, record_of
        self.hub: SenderHub | None = None
        self.tasks: dict[TransferId, asyncio.Task[None]] = {}
        self.blocks: dict[TransferId, list[tuple[BlockId, ...]]] = {}
        """By group of layers."""

    async def submit(self, job: PrefillJob) -> None:
        record = self.record_of(job.transfer_id)
        first = first_sent(self.kv, job.num_tokens, 0)
        blocks = take_for_groups(self.pool, self.kv, -(-job.num_tokens // self.kv.block_size), first)
        self.blocks[job.transfer_id] = blocks
        self.tasks[job.transfer_id] = asyncio.create_task(self._compute(job, record, blocks))

    def abort(self, transfer_id: TransferId) -> None:
        self.tasks[transfer_id].cancel()

    def release(self, transfer_id: TransferId) -> None:
        task = self.tasks.pop(transfer_id)
        task.cancel()
        self.pool.give([block for group in self.blocks.pop(transfer_id) for block in group if block != NO_BLOCK])

    async def _compute(self, job: PrefillJob, record: Record, by_group: list[tuple[BlockId, ...]]) -> None:
        blocks, *windows = by_group
        hub, plan, transfer_id = self.hub, record.plan, job.transfer_id
        if hub is None:
            return
        hub.scheduled(transfer_id, 0.0)
        computed = [self._content(record, group, group_blocks) for group, group_blocks in enumerate(by_group)]
        places = {layer: (g, plane) for g, group in enumerate(self.kv.groups) for plane, layer in enumerate(group)}
        for done in range(plan.step_tokens, job.num_tokens + plan.step_tokens, plan.step_tokens):
            num_done = min(done, job.num_tokens)
            first, last = (done - plan.step_tokens) // self.kv.block_size, -(-num_done // self.kv.block_size)
            for layer in range(self.kv.num_layers):
                # Nothing is there before it is reported.
                group, plane = places[layer]
                begin = max(first, by_group[group].count(NO_BLOCK))
                self.pool.put_plane(plane, by_group[group][begin:last], computed[group][:, plane, begin:last])
                if plan.by_layers and layer + 1 < self.kv.num_layers:
                    before = done - plan.step_tokens
                    hub.progress(
                        transfer_id, before, blocks, windows=windows, coming_tokens=num_done, num_layers=layer + 1
                    )
                    await asyncio.sleep(0)
            hub.progress(transfer_id, num_done, blocks, windows=windows)
            await asyncio.sleep(0)
        if not job.resume:
            hub.first_token(transfer_id, SampledToken(token_id=plan.seed % 1000), cached_tokens=0)
        hub.finished(transfer_id, blocks, windows=windows, cached_tokens=0, times=PhaseTimes())

    def _content(self, record: Record, group: int, blocks: tuple[BlockId, ...]) -> np.ndarray:
        """What these blocks come to hold, `[rank, plane, block, byte]`; nothing where there is no block."""
        first = blocks.count(NO_BLOCK)
        # Cells beyond the last token, as far as they travel, are there with it.
        end = min(len(blocks) * self.kv.block_size, record.content.num_tokens)
        guard = self.pool.guard(blocks[first:])
        there = placed(self.kv, record.content.source, guard, first * self.kv.block_size, end, group=group)
        return np.concatenate([np.zeros_like(there, shape=(*there.shape[:2], first, there.shape[3])), there], axis=2)
