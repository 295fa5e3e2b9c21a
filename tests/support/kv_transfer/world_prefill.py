"""The prefill workers of `world.py`: engine, writes and senders."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import HandoffSize
from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Abort, Drained, FirstToken, HandoffEnvelope, Prefill, TransferKey
from kv_transfer.protocol.sender import Sender, SenderPlan
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import HandoffState
from tandem.values.ids import BlockId, Incarnation, TransferId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import PhaseTimes, SampledToken

if TYPE_CHECKING:
    from tests.support.kv_transfer.world import World

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=1, block_size=2)
SETTINGS = TransferSettings(lease_s=2.0, drain_s=1.0, stall_s=8.0, queue_s=12.0, reroute_s=6.0, max_rewrites=2)
DECODE = Incarnation(1000)

Content = tuple[str, int]


@dataclass(eq=False)
class Write:
    """Bytes on their way."""

    key: TransferKey
    order: act.StartWrite
    slots: tuple[BlockId, ...]
    landed: bool = False
    checksum: int = 0


@dataclass(eq=False)
class Process:
    """One prefill worker of the simulated world."""

    world: "World"
    name: str
    incarnation: Incarnation
    frozen: bool = False
    senders: dict[TransferKey, Sender] = field(default_factory=dict)
    newest: dict[TransferId, int] = field(default_factory=dict)
    computed: dict[TransferKey, int] = field(default_factory=dict)
    holds: dict[TransferKey, None] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)

    def sender_event(self, key: TransferKey, event: ev.SenderEvent) -> None:
        sender = self.senders.get(key)
        if sender is not None and self.world.processes[self.name] is self:
            self.run_sender(key, sender.on_event(event, self.world.now))

    def run_sender(self, key: TransferKey, actions: act.Actions) -> None:
        for action in actions:
            self.do_sender(key, action)
        sender = self.senders.get(key)
        if sender is not None and sender.state is HandoffState.CLOSED:
            del self.senders[key]

    def do_sender(self, key: TransferKey, action: act.Action) -> None:
        match action:
            case act.SendMessage():
                envelope = HandoffEnvelope(incarnation=self.incarnation, addressee=DECODE, key=key, body=action.body)
                self.world.wire.append(("d", envelope))
            case act.SubmitPrefill():
                self.world.pending.append(partial(self.submit, key))
            case act.StartWrite():
                assert key in self.holds, "reads blocks that were freed"
                slots = self.world.grants.get(key)
                if slots is None:
                    failed = ev.WriteFailed(seq=action.seq, rewrite=action.rewrite, reason="refused")
                    self.world.pending.append(partial(self.sender_event, key, failed))
                else:
                    cells: CellRange = action.cells
                    chosen = slots[cells.first_unit : cells.first_unit + cells.num_units]
                    self.writes.append(Write(key, action, chosen))
            case act.CancelWrites():
                self.writes = [w for w in self.writes if w.key != key]
                self.sender_event(key, ev.WritesQuiet())
            case act.ReleaseSources():
                assert not any(w.key == key for w in self.writes), "freed while being read"
                del self.holds[key]

    def submit(self, key: TransferKey) -> None:
        if self.world.processes[self.name] is self:
            self.holds[key] = None
            self.computed[key] = -1
            self.sender_event(key, ev.Submitted())

    def engine(self, key: TransferKey) -> None:
        """One step of the engine: leave the queue, compute a block, sample, finish."""
        job = self.senders[key].plan.job
        self.computed[key] += 1
        step, total = self.computed[key], -(-len(job.token_ids) // LAYOUT.block_size)
        blocks = tuple(BlockId(b) for b in range(total))
        if step == 0:
            self.sender_event(key, ev.PrefillScheduled(queue_s=0.0, tail_hash=None))
        elif step <= total:
            done = min(step * LAYOUT.block_size, len(job.token_ids))
            self.sender_event(key, ev.KVComputed(num_computed_tokens=done, blocks=blocks))
        elif step == total + 1:
            token = FirstToken(token=SampledToken(token_id=1), cached_tokens=0)
            self.sender_event(key, ev.FirstTokenSampled(first_token=token))
        elif step == total + 2:
            self.computed[key] = 20
            times = PhaseTimes()
            self.sender_event(key, ev.PrefillFinished(cached_tokens=0, times=times, tail_hash=None))
        else:
            self.computed[key] = 20

    def can_land(self, write: Write) -> bool:
        return not write.landed and not self.frozen

    def land(self, write: Write, damaged: bool) -> None:
        if not self.world.shared_memory and write.key not in self.world.grants:
            self.stop_writes(write.key)
            return
        job = self.senders[write.key].plan.job
        first = job.held_tokens // LAYOUT.block_size + write.order.cells.first_unit
        for i, slot in enumerate(write.slots):
            assert self.world.owner_of.get(slot) == write.key, "wrote into blocks that are not its own"
            self.world.memory[slot] = None if damaged else (write.key.transfer_id, first + i)
        write.landed = True
        self.world.pending.append(partial(self.written, write))

    def written(self, write: Write) -> None:
        if write in self.writes:
            self.writes.remove(write)
            event = ev.Written(seq=write.order.seq, rewrite=write.order.rewrite, checksum=0, seconds=0.1)
            self.sender_event(write.key, event)

    def stop_writes(self, key: TransferKey) -> None:
        for write in [w for w in self.writes if w.key == key]:
            self.writes.remove(write)
            order = write.order
            failed = ev.WriteFailed(seq=order.seq, rewrite=order.rewrite, reason="revoked")
            self.world.pending.append(partial(self.sender_event, key, failed))

    def deliver(self, envelope: HandoffEnvelope) -> None:
        key, body = envelope.key, envelope.body
        sender = self.senders.get(key)
        if sender is not None:
            self.run_sender(key, sender.on_message(envelope, self.world.now))
        elif isinstance(body, Prefill) and key.attempt > self.newest.get(key.transfer_id, 0):
            self.newest[key.transfer_id] = key.attempt
            plan = SenderPlan(
                key=key,
                own=self.incarnation,
                peer=DECODE,
                job=body.job,
                block_size=LAYOUT.block_size,
                unit_tokens=LAYOUT.block_size,
                whole_tokens=LAYOUT.block_size,
                lanes=(
                    HandoffSize(num_layers=LAYOUT.num_layers, num_heads=1, unit_layer_bytes=LAYOUT.layer_block_bytes),
                ),
                lease_s=SETTINGS.lease_s,
                stall_s=SETTINGS.stall_s,
                queue_s=SETTINGS.queue_s,
                chunk_bytes=LAYOUT.block_bytes,
                write_window=2,
                max_rewrites=SETTINGS.max_rewrites,
            )
            self.senders[key] = Sender(plan, self.world.now)
            self.run_sender(key, self.senders[key].start())
        elif isinstance(body, Abort):
            self.world.wire.append(
                ("d", HandoffEnvelope(incarnation=self.incarnation, addressee=DECODE, key=key, body=Drained()))
            )

    def serve_revoke(self, key: TransferKey) -> None:
        if self.world.processes[self.name] is not self:
            return
        if self.frozen:
            self.world.pending.append(partial(self.serve_revoke, key))
        else:
            self.stop_writes(key)
            self.world._event(key, ev.Quiet())
