"""What a prefill worker does for one request: the plainest shell around the real senders, and its engine."""

from collections import deque
from typing import Any

from kv_transfer import events as ev
from kv_transfer import guards
from kv_transfer.messages import Abort, Drained, Envelope, Failure, FirstToken, Prefill, Reject
from kv_transfer.sender import Sender, SenderPlan
from kv_transfer.states import LIVE, HandoffState
from tandem.errors import TransferError, Unavailable
from tandem.ids import BlockHash, BlockId
from tandem.outputs import PhaseTimes, SampledToken
from tests.explore import properties
from tests.explore.life import DECODE, LANDED, LOOSE, MOVING, OTHER, TORN, Life, SenderSlot, Worker, Write
from tests.explore.scope import LAYOUT, TAIL, Names

TOKEN = FirstToken(token=SampledToken(token_id=1), cached_tokens=0)
OTHER_TAIL = BlockHash(b"other tokens....")
DRAINING = Failure(kind=Unavailable, message="an earlier attempt is still draining")
REFUSED = Failure(kind=Unavailable, message="refused")
STOPPED = 99
"""Step of an engine that has nothing left to do."""


class PrefillSide:
    """Changes lives as their prefill workers would."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._machines = names.machines

    # Messages

    def deliver(self, life: Life, at: int, number: int) -> None:
        """As SenderHub routes messages; but a sender sees those of other attempts too: refusing is its business."""
        envelope = self._names.envelopes.values[number]
        sender = life.workers[at].sender
        if isinstance(envelope.body, Prefill):
            self._prefill(life, at, envelope)
            return
        if isinstance(envelope.body, Abort) and (sender is None or sender.attempt != envelope.key.attempt):
            self._say(life, at, envelope.key, Drained())
        if sender is not None:
            self._step(life, at, ("message", number), lambda machine: machine.on_message(envelope, 0.0))

    def _say(self, life: Life, at: int, key: Any, body: Any) -> None:
        life.messages.add((DECODE, self._names.from_prefill(at, life.workers[at].epoch, key, body)))

    def _prefill(self, life: Life, at: int, envelope: Envelope) -> None:
        worker, key = life.workers[at], envelope.key
        if key is None or guards.superseded(key.attempt, worker.newest or None):
            return
        if worker.sender is not None:
            self.tell(life, at, worker.sender.attempt, ev.Cancelled(reason="superseded"))
        worker = life.workers[at]
        if worker.sender is not None:
            self._say(life, at, key, Reject(failure=DRAINING))
            return
        machine = self._machines.add(Sender(self._plan(envelope), 0.0))
        slot = SenderSlot(key.attempt, machine, -1, False, False)
        life.workers[at] = Worker(worker.epoch, key.attempt, slot)
        self._step(life, at, "start", lambda sender: sender.start())

    def _plan(self, envelope: Envelope) -> SenderPlan:
        settings = self._names.settings
        return SenderPlan(
            key=envelope.key,
            peer=envelope.incarnation,
            job=envelope.body.job,
            layout=LAYOUT,
            lease_s=settings.lease_s,
            stall_s=settings.stall_s,
            queue_s=settings.queue_s,
            chunk_blocks=1,
            write_window=settings.write_window,
            max_rewrites=settings.max_rewrites,
        )

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
        sender = worker.sender

        def run(machine: Any) -> list[tuple[str, Any]]:
            transfer = machine.plan.key
            return self._names.compiled(
                do(machine), lambda body: self._names.from_prefill(at, worker.epoch, transfer, body)
            )

        number, actions = self._machines.step(sender.machine, (at, worker.epoch, key), run)
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
                return self._cancel_writes(life, at)
            case "ReleaseSources":
                sender = properties.holds_sources(worker.sender, "gives back")
                properties.sources_unread(life, at, worker.epoch, sender.attempt)
                self._change(life, at, holds=False, step=STOPPED)
        return None

    def _start_write(self, life: Life, at: int, action: Any) -> None:
        worker = life.workers[at]
        sender = properties.holds_sources(worker.sender, "reads")
        machine = self._machines.get_cached(sender.machine)
        plan = machine.plan
        properties.may_write(machine.reserve, action.rewrite, plan.max_rewrites)
        granted = life.grants.get(sender.attempt)
        failed = ("write failed", at, sender.attempt, action.seq, action.rewrite)
        if granted is None or plan.peer != self._names.decode(life.decode_epoch):
            life.owed.add(failed)
            return
        first = action.cells.first_block
        slots = granted[first : first + action.cells.num_blocks]
        properties.writes_its_own(life, sender.attempt, slots)
        for slot in slots:
            life.blocks[slot] = (life.blocks[slot][0], TORN)
        content = plan.job.held_tokens // LAYOUT.block_size + first + (OTHER if sender.other else 0)
        life.writes.add(Write(sender.attempt, at, worker.epoch, action.seq, action.rewrite, slots, MOVING, content))

    def _cancel_writes(self, life: Life, at: int) -> ev.SenderEvent | None:
        """`shm` copies piece by piece and stops when it notices; `tcp` leaves bytes in the network."""
        worker = life.workers[at]
        attempt = worker.sender.attempt
        mine = [w for w in life.writes if (w.at, w.epoch, w.attempt) == (at, worker.epoch, attempt)]
        if self._names.scope.shared_memory and any(w.phase == MOVING for w in mine):
            life.owed.add(("writes quiet", at, attempt))
            return None
        for write in mine:
            self._stop(life, write)
        return ev.WritesQuiet()

    def _stop(self, life: Life, write: Write) -> None:
        life.writes.discard(write)
        if write.phase == LOOSE:
            life.writes.add(write)
            return
        if write.phase == MOVING and (self._names.scope.remote or not self._names.scope.shared_memory):
            life.writes.add(write._replace(phase=LOOSE))
        life.owed.add(("write failed", write.at, write.attempt, write.seq, write.rewrite))

    def writes_quiet(self, life: Life, at: int, attempt: int) -> None:
        """Answer to CancelWrites."""
        worker = life.workers[at]
        for write in [w for w in life.writes if (w.at, w.epoch, w.attempt) == (at, worker.epoch, attempt)]:
            self._stop(life, write)
        self.tell(life, at, attempt, ev.WritesQuiet())

    # Bytes

    def land(self, life: Life, write: Write, damaged: bool) -> None:
        """The bytes are in the decode worker's memory."""
        properties.writes_its_own(life, write.attempt, write.slots)
        life.writes.discard(write)
        for slot in write.slots:
            life.blocks[slot] = (life.blocks[slot][0], TORN if damaged else write.content)
        if write.phase == MOVING and life.workers[write.at].epoch == write.epoch:
            life.writes.add(write._replace(phase=LANDED))

    def written(self, life: Life, write: Write) -> None:
        """The writer hears of it."""
        life.writes.discard(write)
        event = ev.Written(seq=write.seq, rewrite=write.rewrite, checksum=write.content, seconds=0.0)
        self.tell(life, write.at, write.attempt, event)

    def write_failed(self, life: Life, at: int, attempt: int, seq: int, rewrite: int) -> None:
        """It did not arrive."""
        self.tell(life, at, attempt, ev.WriteFailed(seq=seq, rewrite=rewrite, reason="stopped"))

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
        """One step: leave the queue, compute a block, or sample and finish."""
        sender = life.workers[at].sender
        total = self._names.scope.num_chunks
        job = self._machines.get_cached(sender.machine).plan.job
        first = job.held_tokens // LAYOUT.block_size
        step = sender.step
        self._change(life, at, step=step + 1)
        blocks = tuple(BlockId(b) for b in range(total))
        if step == 0:
            self.tell(life, at, sender.attempt, ev.Scheduled(queue_s=0.0))
            self._change(life, at, step=first + 1)
        elif step <= total:
            done = min(step * LAYOUT.block_size, len(job.token_ids))
            self.tell(life, at, sender.attempt, ev.Progress(num_computed_tokens=done, blocks=blocks))
        else:
            self._change(life, at, step=STOPPED)
            tail = OTHER_TAIL if sender.other else TAIL
            self.tell(life, at, sender.attempt, ev.FirstTokenSampled(first_token=TOKEN))
            self.tell(life, at, sender.attempt, ev.Finished(cached_tokens=0, times=PhaseTimes(), tail_hash=tail))

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
        """The process ends and another starts at its address. `lingers`: the old one only hangs, its writes with it."""
        worker = life.workers[at]
        life.workers[at] = Worker(worker.epoch + 1, 0, None)
        # A link's messages die with the process that it led to.
        life.messages = {message for message in life.messages if message[0] != at}
        for write in list(life.writes):
            if (write.at, write.epoch) == (at, worker.epoch) and not (lingers and write.phase == MOVING):
                life.writes.discard(write)
                if write.phase == MOVING and not self._names.scope.shared_memory:
                    life.writes.add(write._replace(phase=LOOSE))
        life.owed = {
            item
            for item in life.owed
            if not (item[0] in ("submit", "write failed", "writes quiet", "sender link lost") and item[1] == at)
        }
        for attempt, (_machine, to, epoch) in life.receivers.items():
            if (to, epoch) == (at, worker.epoch):
                life.owed.add(("receiver link lost", attempt))
