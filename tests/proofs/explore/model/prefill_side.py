"""What a prefill worker does for one request: the plainest shell around the real senders, and its engine."""

from collections import deque
from typing import Any

from kv_transfer.protocol import events as ev
from kv_transfer.protocol import guards
from kv_transfer.protocol.messages import Abort, Drained, Failure, FirstToken, HandoffEnvelope, Prefill, Reject
from kv_transfer.protocol.sender import Sender
from kv_transfer.protocol.states import LIVE, HandoffState
from tandem.errors import TransferError, Unavailable
from tandem.values.ids import BlockHash, BlockId
from tandem.values.outputs import PhaseTimes, SampledToken
from tests.proofs.explore.model import properties
from tests.proofs.explore.model.engine import COMPUTED, FINISH, SCHEDULE, STOPPED, Engine
from tests.proofs.explore.model.life import DECODE, MOVING, TORN, Life, SenderSlot, Worker, Write
from tests.proofs.explore.model.scope import TAIL, UNIT_TOKENS, Names
from tests.proofs.explore.model.writing import Writing

TOKEN = FirstToken(token=SampledToken(token_id=1), cached_tokens=0)
OTHER_TAIL = BlockHash(b"other tokens....")
DRAINING = Failure(kind=Unavailable, message="an earlier attempt is still draining")
REFUSED = Failure(kind=Unavailable, message="refused")


class PrefillSide:
    """Changes lives as their prefill workers would."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._machines = names.machines
        self.engine_of = Engine(names.scope)
        self.writing = Writing(names.scope)

    # Messages

    def deliver(self, life: Life, at: int, number: int) -> None:
        """As SenderHub routes messages; but a sender sees those of other attempts too: refusing is its business."""
        envelope = self._names.envelopes.values[number]
        worker = life.workers[at]
        if guards.misdirected(envelope, self._names.prefill(at, worker.epoch)):
            return
        sender = worker.sender
        if isinstance(envelope.body, Prefill):
            self._prefill(life, at, envelope)
            return
        if isinstance(envelope.body, Abort) and (sender is None or sender.attempt != envelope.key.attempt):
            self._say(life, at, envelope, Drained())
        if sender is not None:
            self._step(life, at, ("message", number), lambda machine: machine.on_message(envelope, 0.0))

    def _say(self, life: Life, at: int, request: HandoffEnvelope, body: Any) -> None:
        """Answer without a sender."""
        mine = self._names.prefill(at, life.workers[at].epoch)
        if request.incarnation == self._names.decode(life.decode_epoch):
            life.messages.add((DECODE, self._names.envelope(mine, request.incarnation, request.key, body)))

    def _prefill(self, life: Life, at: int, envelope: HandoffEnvelope) -> None:
        worker, key = life.workers[at], envelope.key
        if key is None or guards.superseded(key.attempt, worker.newest or None):
            return
        if worker.sender is not None:
            self.tell(life, at, worker.sender.attempt, ev.HandoffCancelled(reason="superseded"))
        worker = life.workers[at]
        if worker.sender is not None:
            self._say(life, at, envelope, Reject(failure=DRAINING))
            return
        machine = self._machines.add(Sender(self._names.sender_plan(envelope), 0.0))
        slot = SenderSlot(key.attempt, machine, -1, False, False, -1)
        life.workers[at] = Worker(worker.epoch, key.attempt, slot)
        self._step(life, at, "start", lambda sender: sender.start())

    # The sender

    def tell(self, life: Life, at: int, attempt: int, event: ev.SenderEvent) -> None:
        """Something happened to a sender, if it is still there."""
        sender = life.workers[at].sender
        if sender is not None and sender.attempt == attempt:
            self._step(life, at, event, lambda machine: machine.on_event(event, 0.0))

    def expire(self, life: Life, at: int, beyond: float) -> None:
        """The reaper's visit after its leases have ended."""
        self._step(life, at, ("expire", beyond), lambda machine: machine.on_timer(beyond))
        sender = life.workers[at].sender
        if sender is not None and self._machines.states[sender.machine] in LIVE:
            raise properties.Violation(f"the sender of attempt {sender.attempt} goes on after its time has ended")

    def _step(self, life: Life, at: int, key: Any, do: Any) -> None:
        queue: deque[tuple[str, Any]] = deque(self._advance(life, at, key, do))
        while queue:
            event = self._execute(life, at, *queue.popleft())
            if event is not None:
                queue.extend(self._advance(life, at, event, lambda m, e=event: m.on_event(e, 0.0)))
        worker = life.workers[at]
        if worker.sender is not None and self._machines.states[worker.sender.machine] is HandoffState.CLOSED:
            if worker.sender.holds:
                raise properties.Violation(f"the sources of attempt {worker.sender.attempt} leak")
            life.workers[at] = worker._replace(sender=None)

    def _advance(self, life: Life, at: int, key: Any, do: Any) -> list[tuple[str, Any]]:
        worker = life.workers[at]
        mine = self._names.prefill(at, worker.epoch)

        def run(machine: Any) -> list[tuple[str, Any]]:
            plan = machine.plan
            return self._names.compiled(do(machine), lambda body: self._names.envelope(mine, plan.peer, plan.key, body))

        number, actions = self._machines.step(worker.sender.machine, (mine, key), run)
        self._change(life, at, machine=number)
        return actions

    def _change(self, life: Life, at: int, **changes: Any) -> None:
        worker = life.workers[at]
        life.workers[at] = worker._replace(sender=worker.sender._replace(**changes))

    def _execute(self, life: Life, at: int, kind: str, action: Any) -> ev.SenderEvent | None:
        worker = life.workers[at]
        match kind:
            case "Send":
                if self._machines.get_cached(worker.sender.machine).plan.peer == self._names.decode(life.decode_epoch):
                    life.messages.add((DECODE, action))
            case "SubmitPrefill":
                life.owed.add(("submit", at, worker.sender.attempt))
            case "StartWrite":
                self._start_write(life, at, action)
            case "AbortPrefill":
                self._change(life, at, step=STOPPED)
            case "CancelWrites":
                return ev.WritesQuiet() if self.writing.cancel(life, at, worker.sender.attempt) else None
            case "ReleaseSources":
                sender = properties.holds_sources(worker.sender, "gives back")
                properties.sources_unread(life, at, worker.epoch, sender.attempt)
                self._change(life, at, holds=False, step=STOPPED)
        return None

    def _start_write(self, life: Life, at: int, action: Any) -> None:
        worker, scope = life.workers[at], self._names.scope
        sender = properties.holds_sources(worker.sender, "reads")
        machine = self._machines.get_cached(sender.machine)
        plan = machine.plan
        properties.may_write(machine.reserve, action.lane, action.rewrite, plan.max_rewrites)
        grant = life.grants.get((sender.attempt, action.lane))
        if grant is None or plan.peer != self._names.decode(life.decode_epoch):
            life.owed.add(("write failed", at, sender.attempt, action.seq, action.rewrite))
            return
        blocks, *granted = grant
        properties.granted_to(tuple(granted), (at, worker.epoch))
        slots = scope.slots(action.cells, blocks, self._names.lanes[action.lane].group)
        properties.writes_its_own(life, sender.attempt, slots)
        life.put(slots, (TORN,) * len(slots))
        content = self.engine_of.read(sender, plan.job.held_tokens // UNIT_TOKENS, action)
        chunk = (action.lane, action.seq, action.rewrite)
        life.writes.add(Write(sender.attempt, at, worker.epoch, *chunk, slots, MOVING, content))

    # Bytes

    def written(self, life: Life, write: Write) -> None:
        """The writer hears that its bytes are there."""
        life.writes.discard(write)
        event = ev.Written(seq=write.seq, rewrite=write.rewrite, checksum=write.content, seconds=0.0)
        self.tell(life, write.at, write.attempt, event)

    def write_failed(self, life: Life, at: int, attempt: int, seq: int, rewrite: int) -> None:
        """They did not arrive."""
        self.tell(life, at, attempt, ev.WriteFailed(seq=seq, rewrite=rewrite, reason="stopped"))

    def writes_quiet(self, life: Life, at: int, attempt: int) -> None:
        self.writing.stop_all(life, at, attempt)
        self.tell(life, at, attempt, ev.WritesQuiet())

    # The engine

    def submit(self, life: Life, at: int, attempt: int, *, accepted: bool) -> None:
        """The engine queues the job, or not."""
        sender = life.workers[at].sender
        if sender is None or sender.attempt != attempt:
            return
        if accepted:
            self._change(life, at, step=0, holds=True)
            self.tell(life, at, attempt, ev.Submitted())
        else:
            self.tell(life, at, attempt, ev.SubmitRefused(failure=REFUSED))

    def engine(self, life: Life, at: int) -> None:
        """What it does next: see `engine.py`."""
        sender = life.workers[at].sender
        op = self.engine_of.program(self._held_units(sender))[sender.step]
        self._change(life, at, step=STOPPED if op.kind == FINISH else sender.step + 1)
        table = tuple(map(BlockId, self.engine_of.table(sender.thrown_out)))
        tail = OTHER_TAIL if sender.other else TAIL
        if op.kind == SCHEDULE:
            self.tell(life, at, sender.attempt, ev.PrefillScheduled(queue_s=0.0, tail_hash=tail))
            return
        tokens = self.engine_of.tokens
        coming = tokens(op.coming) if op.layers else 0
        progress = ev.KVComputed(
            num_computed_tokens=tokens(op.ready),
            blocks=table,
            windows=self.engine_of.windows(table),
            coming_tokens=coming,
            num_layers=op.layers,
        )
        if op.kind == FINISH:
            self.tell(life, at, sender.attempt, ev.FirstTokenSampled(first_token=TOKEN))
            self.tell(life, at, sender.attempt, progress)
            self.tell(life, at, sender.attempt, ev.PrefillFinished(cached_tokens=0, times=PhaseTimes(), tail_hash=tail))
        else:
            self.tell(life, at, sender.attempt, progress)

    def lend(self, life: Life, at: int, num_units: int) -> None:
        """The answer to a fetch: so much of the prefix is held here."""
        sender, scope = life.workers[at].sender, self._names.scope
        self._change(life, at, step=STOPPED)
        whole = max(scope.units_per_source, scope.units_per_block)
        num_units = num_units // whole * whole
        tail = self._names.prefix[num_units - 1] if num_units else None
        table = tuple(map(BlockId, self.engine_of.table(-1)[: num_units // scope.units_per_source]))
        tokens = num_units * UNIT_TOKENS
        self.tell(life, at, sender.attempt, ev.PrefillScheduled(queue_s=0.0, tail_hash=tail, num_tokens=tokens))
        self.tell(life, at, sender.attempt, ev.KVComputed(num_computed_tokens=tokens, blocks=table))
        self.tell(
            life, at, sender.attempt, ev.PrefillFinished(cached_tokens=tokens, times=PhaseTimes(), tail_hash=tail)
        )

    def between_steps(self, sender: SenderSlot) -> bool:
        """Whether a step of the engine has just ended, and another will follow."""
        program = self.engine_of.program(self._held_units(sender))
        return 0 < sender.step < STOPPED and program[sender.step - 1].kind == COMPUTED

    def _held_units(self, sender: SenderSlot) -> int:
        return self._machines.get_cached(sender.machine).plan.job.held_tokens // UNIT_TOKENS

    def preempt(self, life: Life, at: int) -> None:
        """The prompt loses its blocks, but for those that a sender holds, and is computed again."""
        self._change(life, at, thrown_out=life.workers[at].sender.step, step=1)

    def fail(self, life: Life, at: int) -> None:
        """The engine gives the request up."""
        sender = life.workers[at].sender
        self._change(life, at, step=STOPPED)
        failure = Failure(kind=TransferError, message="engine")
        self.tell(life, at, sender.attempt, ev.PrefillFailed(failure=failure))

    def mistake(self, life: Life, at: int) -> None:
        """A stale reference: it computes another prompt."""
        self._change(life, at, other=True)

    # Death

    def crash(self, life: Life, at: int, *, lingers: bool) -> None:
        """The process ends and another starts at its address. `lingers`: the old one only hangs, its writes with it.

        What was sent to it reaches its successor.
        """
        worker = life.workers[at]
        life.workers[at] = Worker(worker.epoch + 1, 0, None)
        self.writing.writer_dies(life, at, worker.epoch, lingers=lingers)
        life.owed = {
            item
            for item in life.owed
            if not (item[0] in ("submit", "write failed", "writes quiet", "sender link lost") and item[1] == at)
        }
        for attempt, (_machine, to, epoch) in life.receivers.items():
            if (to, epoch) == (at, worker.epoch):
                life.owed.add(("receiver link lost", attempt))
