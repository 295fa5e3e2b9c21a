"""A world without I/O in which the real state machines meet every kind of trouble.

One decode worker, two prefill workers, some hand-offs. Everything that could happen next (deliver, repeat or lose a
message, land a write, finish an engine step, expire, crash, cancel) is a move; the test picks the next one. Memory is
modelled per block, so that a write into blocks that are not its own any more is seen at once.
"""

from collections.abc import Callable
from functools import partial

from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.handoff_retry import HandoffRetry
from kv_transfer.protocol.messages import (
    Abort,
    Chunk,
    FirstToken,
    HandoffEnvelope,
    Offer,
    PrefillJob,
    Seal,
    TransferKey,
)
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.states import LIVE, HandoffState
from tandem.values.ids import BlockHash, BlockId, Incarnation, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.kv_transfer.world_prefill import DECODE, LAYOUT, SETTINGS, Content, Process

NUM_BLOCKS = 40
Move = Callable[[], None]


class World:
    """See the module's docstring. `shared_memory` makes revocations depend on the writer, as `shm` does."""

    def __init__(self, *, num_transfers: int, shared_memory: bool, max_faults: int) -> None:
        self.shared_memory = shared_memory
        self.faults_left = max_faults
        self.now = 0.0
        self.wire: list[tuple[str, HandoffEnvelope]] = []
        self.pending: list[Move] = []
        self.processes = {name: Process(self, name, Incarnation(i)) for i, name in enumerate(("p", "q"), 1)}
        self.next_incarnation = 10
        self.ladders = {TransferId(f"t{i}"): self._ladder(i) for i in range(num_transfers)}
        self.receivers: dict[TransferKey, Receiver] = {}
        self.routes: dict[TransferKey, tuple[str, Incarnation]] = {}
        self.grants: dict[TransferKey, tuple[BlockId, ...]] = {}
        self.bound: dict[TransferKey, tuple[BlockId, ...]] = {}
        self.memory: dict[BlockId, Content | None] = dict.fromkeys(map(BlockId, range(NUM_BLOCKS)))
        self.free: list[BlockId] = list(self.memory)
        self.owner_of: dict[BlockId, TransferKey] = {}
        self.kept: dict[TransferId, list[BlockId]] = {t: [] for t in self.ladders}
        self.tokens: dict[TransferId, list[FirstToken]] = {t: [] for t in self.ladders}
        self.committed: set[TransferId] = set()
        for transfer_id in self.ladders:
            self._begin(transfer_id, "p", 1)

    def _ladder(self, index: int) -> HandoffRetry:
        job = PrefillJob(
            transfer_id=TransferId(f"t{index}"),
            request_id=RequestId("r"),
            token_ids=tuple(range(7 - 2 * index)),
            num_prompt_tokens=7 - 2 * index,
            held_tokens=0,
            sampling=SamplingParams(),
            hash_root=BlockHash(bytes(16)),
        )
        return HandoffRetry(job, own=DECODE, layout=LAYOUT, settings=SETTINGS)

    # What can happen

    def moves(self) -> list[Move]:
        """What can happen next without anybody's fault."""
        moves: list[Move] = [partial(self._deliver, i) for i in range(len(self.wire))]
        moves += [partial(self._complete, i) for i in range(len(self.pending))]
        for process in self.processes.values():
            if not process.frozen:
                moves += [partial(process.engine, key) for key in process.holds]
            moves += [partial(process.land, w, False) for w in process.writes if process.can_land(w)]
        if not moves or self.now < 1.0:
            moves.append(self._tick)
        for transfer_id, ladder in self.ladders.items():
            if ladder.waiting:
                attempt = (ladder.newest_attempt or 0) + 1
                moves += [partial(self._begin, transfer_id, name, attempt) for name in self.processes]
        return moves

    def faults(self) -> list[Move]:
        """What trouble can happen next."""
        if self.faults_left <= 0:
            return []
        moves: list[Move] = []
        for i in range(len(self.wire)):
            moves += [partial(self._lose, i), partial(self._repeat, i)]
        for process in self.processes.values():
            moves += [partial(self._crash, process), partial(self._freeze, process), partial(self._cut, process)]
            moves += [partial(process.land, w, True) for w in process.writes if process.can_land(w)]
        moves += [self._tick, self._tick]
        moves += [partial(self.cancel, t) for t, ladder in self.ladders.items() if not ladder.ended]
        return [partial(self._fault, move) for move in moves]

    def _fault(self, move: Move) -> None:
        self.faults_left -= 1
        move()

    def settle(self) -> None:
        """No more trouble: whatever is alive runs on; hand-offs that nobody reroutes are cancelled."""
        self.faults_left = 0
        for process in self.processes.values():
            process.frozen = False
        for _ in range(400):
            if self.wire:
                self._deliver(0)
            elif self.pending:
                self._complete(0)
            elif writes := [(p, w) for p in self.processes.values() for w in p.writes if p.can_land(w)]:
                writes[0][0].land(writes[0][1], False)
            elif held := [(p, k) for p in self.processes.values() for k in p.holds if p.computed[k] < 20]:
                held[0][0].engine(held[0][1])
            elif waiting := [t for t, ladder in self.ladders.items() if ladder.waiting]:
                self.cancel(waiting[0])
            elif self.receivers or any(p.senders for p in self.processes.values()):
                self._tick()
            else:
                break
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """Every hand-off has ended and every block is free."""
        assert not self.receivers, {k: r.state for k, r in self.receivers.items()}
        assert not self.owner_of
        assert sorted(self.free) == sorted(self.memory)
        for process in self.processes.values():
            assert not process.senders, {k: s.state for k, s in process.senders.items()}
            assert not process.holds
            assert not process.writes
        for ladder in self.ladders.values():
            assert ladder.ended

    # Messages and time

    def _deliver(self, index: int) -> None:
        to, envelope = self.wire.pop(index)
        if to == "d":
            self._deliver_to_decode(envelope)
            return
        process = self.processes[to]
        if process.frozen:
            self.wire.append((to, envelope))
            return
        process.deliver(envelope)

    def _deliver_to_decode(self, envelope: HandoffEnvelope) -> None:
        key = envelope.key
        # To every attempt of the hand-off: telling them apart is the machines' business.
        mine = [k for k in self.receivers if k.transfer_id == key.transfer_id]
        for other in mine:
            self._run_receiver(other, self.receivers[other].on_message(envelope, self.now))
        if not mine and isinstance(envelope.body, Offer | Chunk | Seal):
            abort = Abort(reason="unknown")
            answer = HandoffEnvelope(incarnation=DECODE, addressee=envelope.incarnation, key=key, body=abort)
            self._post(envelope.incarnation, answer)

    def _post(self, incarnation: Incarnation, envelope: HandoffEnvelope) -> None:
        """To the process of that incarnation, if it still runs."""
        for process in self.processes.values():
            if process.incarnation == incarnation:
                self.wire.append((process.name, envelope))

    def _lose(self, index: int) -> None:
        self.wire.pop(index)

    def _repeat(self, index: int) -> None:
        self.wire.append(self.wire[index])

    def _complete(self, index: int) -> None:
        self.pending.pop(index)()

    def _tick(self) -> None:
        self.now += 0.6
        for process in self.processes.values():
            for key, sender in process.senders.items():
                receiver = self.receivers.get(key)
                if not process.frozen and receiver is not None and receiver.plan.peer == process.incarnation:
                    if sender.state in LIVE:
                        receiver.renew(self.now)
                    if receiver.state in LIVE:
                        sender.renew(self.now)
        for key, receiver in list(self.receivers.items()):
            self._run_receiver(key, receiver.on_timer(self.now))
        for process in self.processes.values():
            if not process.frozen:
                for key, sender in list(process.senders.items()):
                    process.run_sender(key, sender.on_timer(self.now))
        for transfer_id, ladder in self.ladders.items():
            if ladder.expired(self.now):
                self.cancel(transfer_id)

    # Trouble

    def _crash(self, process: Process) -> None:
        """It restarts at the same address; what it was writing stops."""
        dead = [k for k, (name, inc) in self.routes.items() if (name, inc) == (process.name, process.incarnation)]
        self.processes[process.name] = Process(self, process.name, Incarnation(self.next_incarnation))
        self.next_incarnation += 1
        for key in dead:
            self.pending.append(partial(self._event, key, ev.LinkLost(reason="gone")))
            # The end of its socket on the same host.
            self.pending.append(partial(self._event, key, ev.Quiet()))

    def _freeze(self, process: Process) -> None:
        process.frozen = not process.frozen

    def _cut(self, process: Process) -> None:
        """The link breaks: both sides notice, each in its own time."""
        self.wire = [(to, e) for to, e in self.wire if to != process.name and e.incarnation != process.incarnation]
        for key, (name, incarnation) in self.routes.items():
            if (name, incarnation) == (process.name, process.incarnation):
                self.pending.append(partial(self._event, key, ev.LinkLost(reason="cut")))
        for key in process.senders:
            self.pending.append(partial(process.sender_event, key, ev.LinkLost(reason="cut")))

    def cancel(self, transfer_id: TransferId) -> None:
        """The client has left."""
        ladder = self.ladders[transfer_id]
        key = TransferKey(transfer_id=transfer_id, attempt=ladder.newest_attempt or 0)
        ladder.end()
        self._give(self.kept[transfer_id])
        self.kept[transfer_id] = []
        self._event(key, ev.HandoffCancelled(reason="left"))

    # The decode worker

    def _begin(self, transfer_id: TransferId, name: str, attempt: int) -> None:
        process = self.processes[name]
        receiver = self.ladders[transfer_id].begin(attempt, process.incarnation, self.now)
        key = receiver.plan.key
        self.receivers[key] = receiver
        self.routes[key] = (name, process.incarnation)
        self._run_receiver(key, receiver.start(LAYOUT.block_size))

    def _event(self, key: TransferKey, event: ev.ReceiverEvent) -> None:
        receiver = self.receivers.get(key)
        if receiver is not None:
            self._run_receiver(key, receiver.on_event(event, self.now))

    def _run_receiver(self, key: TransferKey, actions: act.Actions) -> None:
        for action in actions:
            self._do_receiver(key, action)
        receiver = self.receivers.get(key)
        if receiver is not None and receiver.state is HandoffState.CLOSED:
            del self.receivers[key]

    def _do_receiver(self, key: TransferKey, action: act.Action) -> None:
        transfer_id = key.transfer_id
        match action:
            case act.SendMessage():
                name, incarnation = self.routes[key]
                if self.processes[name].incarnation == incarnation:
                    self.wire.append(
                        (name, HandoffEnvelope(incarnation=DECODE, addressee=incarnation, key=key, body=action.body))
                    )
            case act.BindBlocks():
                self.pending.append(partial(self._bind, key, action.num_blocks))
            case act.OpenGrant():
                self.grants[key] = self.bound[key] = action.blocks
                opened = ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=self.shared_memory)
                self._event(key, opened)
            case act.Verify():
                self.pending.append(partial(self._verify, key, action))
            case act.ForwardFirstToken():
                self.ladders[transfer_id].first_token_known()
                self.tokens[transfer_id].append(action.first_token)
                assert len(self.tokens[transfer_id]) == 1, "sampled twice"
            case act.Commit():
                self._check_commit(key, action.info)
                self.pending.append(partial(self._commit, key, action.info))
            case act.Revoke():
                self._revoke(key)
            case act.ReportFailed():
                self._failed(transfer_id, action)
            case act.ReleaseBlocks():
                self._release(key, action.blocks)
            case act.Quarantine():
                assert self.shared_memory, "a revocation by the receiver is a proof"

    def _failed(self, transfer_id: TransferId, action: act.ReportFailed) -> None:
        ladder = self.ladders[transfer_id]
        assert not ladder.ended, "failed after its end"
        self._check_content(transfer_id, action.landed, len(self.kept[transfer_id]))
        for block in action.landed:
            del self.owner_of[block]
        self.kept[transfer_id] += action.landed
        ladder.failed(len(action.landed), self.now)

    def _release(self, key: TransferKey, blocks: tuple[BlockId, ...]) -> None:
        for block in blocks:
            assert self.owner_of.pop(block) == key
        self._give(list(blocks))

    def _bind(self, key: TransferKey, count: int) -> None:
        blocks, self.free = tuple(self.free[:count]), self.free[count:]
        assert len(blocks) == count
        for block in blocks:
            self.owner_of[block] = key
            self.memory[block] = None
        self._event(key, ev.BlocksBound(blocks=blocks))

    def _give(self, blocks: list[BlockId]) -> None:
        assert not set(blocks) & set(self.free)
        assert not set(blocks) & set(self.owner_of)
        self.free += blocks

    def _verify(self, key: TransferKey, action: act.Verify) -> None:
        cells = action.chunk.cells
        receiver = self.receivers.get(key)
        blocks = self.bound[key][cells.first_unit : cells.first_unit + cells.num_units]
        intact = all(self.memory[block] is not None for block in blocks) and action.chunk.checksum == 0
        first = len(self.kept[key.transfer_id]) + cells.first_unit
        if receiver is not None and receiver.state in LIVE:
            expected = [(key.transfer_id, first + i) for i in range(len(blocks))]
            intact = [self.memory[block] for block in blocks] == expected
        event = ev.Verified(seq=action.chunk.seq, rewrite=action.chunk.rewrite, intact=intact)
        self._event(key, event)

    def _check_content(self, transfer_id: TransferId, blocks: tuple[BlockId, ...], first: int) -> None:
        for i, block in enumerate(blocks):
            assert self.memory[block] == (transfer_id, first + i), "wrong bytes"

    def _check_commit(self, key: TransferKey, info: act.CommitInfo) -> None:
        transfer_id = key.transfer_id
        assert transfer_id not in self.committed
        self._check_content(transfer_id, info.blocks, len(self.kept[transfer_id]))
        num_tokens = len(self.ladders[transfer_id].job.token_ids)
        assert len(self.kept[transfer_id]) + len(info.blocks) == -(-num_tokens // LAYOUT.block_size)
        assert self.tokens[transfer_id], "committed without a first token"
        under_way = [w for p in self.processes.values() for w in p.writes if w.key == key and not w.landed]
        assert not under_way, "committed while its writer was writing"

    def _commit(self, key: TransferKey, info: act.CommitInfo) -> None:
        transfer_id = key.transfer_id
        for block in info.blocks:
            del self.owner_of[block]
        blocks = [*self.kept[transfer_id], *info.blocks]
        if not self.ladders[transfer_id].ended:
            self.committed.add(transfer_id)
            self._check_content(transfer_id, tuple(blocks), 0)
            self.ladders[transfer_id].end()
        else:
            blocks = list(info.blocks)
        self.kept[transfer_id] = []
        self._give(blocks)
        self._event(key, ev.Committed())

    def _revoke(self, key: TransferKey) -> None:
        self.grants.pop(key, None)
        name, incarnation = self.routes[key]
        process = self.processes[name]
        writing = process.incarnation == incarnation and any(w.key == key for w in process.writes)
        if self.shared_memory and writing:
            self.pending.append(partial(process.serve_revoke, key))
        else:
            if not self.shared_memory:
                process.stop_writes(key)
            self._event(key, ev.Quiet())
