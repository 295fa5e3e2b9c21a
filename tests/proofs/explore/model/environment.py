"""The moves of one life: what can happen next by itself, and what trouble can."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Body, Chunk, CommitAck, HandoffEnvelope, Nack, Offer, Reserve, Seal
from kv_transfer.protocol.states import HandoffState
from tests.proofs.explore.model import properties
from tests.proofs.explore.model.decode_side import DecodeSide, live
from tests.proofs.explore.model.engine import STOPPED
from tests.proofs.explore.model.freeze import BEYOND_DEADLINE, BEYOND_LEASES
from tests.proofs.explore.model.life import DECODE, LANDED, MOVING, NEW, OPEN, Life, Packed
from tests.proofs.explore.model.prefill_side import OTHER_TAIL, PrefillSide
from tests.proofs.explore.model.scope import Names, Scope

Move = tuple[Any, ...]


class Environment:
    """Pure: (life, move) -> life."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.names = Names(scope=scope)
        self.decode = DecodeSide(self.names)
        self.prefill = PrefillSide(self.names)
        self._states = self.names.machines.states

    # What can happen

    def progress(self, life: Packed) -> list[Move]:
        """What happens next without anybody's fault; binding, which needs the pool, comes as ("bind", attempt, n)."""
        moves: list[Move] = [("deliver", *message) for message in life.messages]
        moves += [item for item in life.owed if item[0] != "quiet" or self._can_be_quiet(life, *item[1:])]
        for write in life.writes:
            if write.phase != LANDED:
                moves.append(("land", write))
            elif life.workers[write.at].epoch == write.epoch:
                moves.append(("written", write))
            if write.epoch != life.workers[write.at].epoch and write.phase == MOVING:
                moves.append(("lingerer dies", write.at, write.epoch))
        for at, worker in enumerate(life.workers):
            if worker.sender is not None and 0 <= worker.sender.step < STOPPED:
                lends = [("lend", at, units) for units in range(self.scope.num_units + 1)]
                moves += lends if self.scope.fetch else [("engine", at)]
        if life.request == NEW:
            moves.append(("begin", 0))
        elif self.decode.ladder_waits(life.ladder):
            if life.attempt < self.scope.max_attempts:
                moves += [("begin", 0), ("begin", 1)]
            moves.append(("give up",))
        expiries = list(self._expiries(life))
        wanted = {attempt for attempt, (machine, *_to) in life.receivers if live(self._states[machine])}
        moves += [("refuse to bind", attempt) for attempt in self._asked(life) if attempt not in wanted]
        # Only the pool is awaited, or nothing: time passes. So an end never needs what another request may hold.
        idle = all(move[0] == "bind" for move in moves)
        moves += [move for move, free in expiries if free or idle]
        return moves

    def faults(self, life: Packed) -> list[Move]:
        """What trouble can come next."""
        free = set(self.progress(life))
        moves: list[Move] = [(kind, *message) for message in life.messages for kind in ("lose", "repeat")]
        moves += [("damage", write) for write in life.writes if write.phase != LANDED]
        moves += [("expire", *move[1:]) for move, _free in self._expiries(life) if move not in free]
        moves += [move for a in self._asked(life) if (move := ("refuse to bind", a)) not in free]
        moves += [("refuse to submit", item[1], item[2]) for item in life.owed if item[0] == "submit"]
        for at in range(2):
            moves += self._worker_faults(life, at)
        moves += [("bind too few", *item[1:]) for item in life.owed if item[0] == "bind"]
        if self.scope.bent:
            moves += [("bend", to, number) for to, bent in life.messages for number in self._bent(bent)]
        if life.request == OPEN:
            moves.append(("cancel",))
        if life.decode_epoch == 0 and (life.request == OPEN or life.receivers or self._to(life, DECODE)):
            moves.append(("decode worker crashes",))
        if self.scope.only is not None:
            moves = [move for move in moves if move[0] in self.scope.only]
        return moves

    def _bent(self, number: int) -> list[int]:
        envelopes = self.names.envelopes
        return [envelopes.number(e) for e in bends(envelopes.values[number], self.scope)]

    @staticmethod
    def _asked(life: Packed) -> list[int]:
        """Attempts that wait for blocks."""
        return [item[1] for item in life.owed if item[0] == "bind"]

    @staticmethod
    def _to(life: Packed, where: int) -> bool:
        return any(to == where for to, _number in life.messages)

    def _worker_faults(self, life: Packed, at: int) -> Iterator[Move]:
        epoch, _newest, sender = life.workers[at]
        routed = any((to, e) == (at, epoch) for _a, (_m, to, e) in life.receivers)
        if sender is not None or routed:
            yield ("cut", at)
        if sender is not None or routed or self._to(life, at):
            yield ("crash", at)
        if any((w.at, w.epoch, w.phase) == (at, epoch, MOVING) for w in life.writes):
            yield ("hang", at)
        if sender is None:
            return
        if live(self._states[sender.machine]):
            yield ("deadline", at)
            if 0 <= sender.step < STOPPED:
                yield ("engine fails", at)
        if self.scope.mistakes and not sender.other and 0 <= sender.step < STOPPED:
            yield ("computes other tokens" if sender.step == 0 else "goes on with other tokens", at)
        if self.scope.preempts and sender.thrown_out < 0 and self.prefill.between_steps(sender):
            yield ("preempt", at)

    def _expiries(self, life: Packed) -> Iterator[tuple[Move, bool]]:
        """Leases that can end, and whether they do so without anybody being late."""
        for attempt, (machine, at, epoch) in life.receivers:
            state = self._states[machine]
            if live(state):
                yield ("expire", "receiver", attempt), life.workers[at].epoch != epoch
            elif state is HandoffState.ABORTING and attempt in self._waiting_for_proof(life):
                yield ("expire", "receiver", attempt), True
            elif state is HandoffState.QUARANTINED:
                yield ("expire", "receiver", attempt), False
        mine = {attempt for attempt, (machine, *_to) in life.receivers if live(self._states[machine])}
        for at, worker in enumerate(life.workers):
            if worker.sender is not None and live(self._states[worker.sender.machine]):
                yield ("expire", "sender", at), worker.sender.attempt not in mine and not life.messages

    def _waiting_for_proof(self, life: Packed) -> set[int]:
        return {item[1] for item in life.owed if item[0] == "quiet"}

    def _can_be_quiet(self, life: Packed, attempt: int, lane: int) -> bool:
        """A hanging writer answers no revocation; its end is the proof. A region does one thing after the other."""
        return ("opened", attempt, lane) not in life.owed and not any(
            (w.attempt, w.lane) == (attempt, lane) and w.phase == MOVING and w.epoch != life.workers[w.at].epoch
            for w in life.writes
        )

    # Making it happen

    def apply(self, packed: Packed, move: Move) -> Packed:
        """The life after a move. Raises Violation, or whatever the machines raise."""
        life = Life.unpack(packed)
        self._apply(life, move)
        packed = life.pack()
        properties.at_rest(packed)
        return packed

    def _apply(self, life: Life, move: Move) -> None:
        match move:
            case ("deliver" | "repeat" | "bend" | "lose", to, number):
                if move[0] in ("deliver", "lose"):
                    life.messages.discard((to, number))
                if move[0] != "lose":
                    self._deliver(life, to, number)
            case ("land" | "damage", write):
                self.prefill.writing.land(life, write, damaged=move[0] == "damage")
            case ("written", write):
                self.prefill.written(life, write)
            case ("begin", at):
                self.decode.begin(life, at)
            case ("give up" | "cancel",):
                self.decode.cancel(life, event=move[0] == "cancel")
            case ("expire", "receiver", attempt):
                self.decode.expire(life, attempt, BEYOND_LEASES)
            case ("decode worker crashes",):
                self.decode.crash(life)
            case ("cut", at):
                self._cut(life, at)
            case ("bind" | "bind too few" | "refuse to bind", *_):
                self._bind(life, move)
            case _:
                self._answer_or_apply_to_worker(life, move)

    def _bind(self, life: Life, move: Move) -> None:
        life.owed = {item for item in life.owed if item[:2] != ("bind", move[1])}
        match move:
            case ("bind", attempt, blocks):
                self.decode.bind(life, attempt, blocks)
            case ("bind too few", attempt, _count):
                self.decode.bind(life, attempt, ())
            case ("refuse to bind", attempt):
                self.decode.refuse(life, attempt)

    def _answer_or_apply_to_worker(self, life: Life, move: Move) -> None:
        if move in life.owed:
            life.owed.discard(move)
            self._answer(life, move)
        else:
            self._apply_to_worker(life, move)

    def _apply_to_worker(self, life: Life, move: Move) -> None:
        match move:
            case ("engine", at):
                self.prefill.engine(life, at)
            case ("lend", at, num_units):
                self.prefill.lend(life, at, num_units)
            case ("expire", "sender", at):
                self.prefill.expire(life, at, BEYOND_LEASES)
            case ("deadline", at):
                self.prefill.expire(life, at, BEYOND_DEADLINE)
            case ("refuse to submit", at, attempt):
                life.owed.discard(("submit", at, attempt))
                self.prefill.submit(life, at, attempt, accepted=False)
            case ("engine fails", at):
                self.prefill.fail(life, at)
            case ("computes other tokens" | "goes on with other tokens", at):
                self.prefill.mistake(life, at)
            case ("preempt", at):
                self.prefill.preempt(life, at)
            case ("crash", at) | ("hang", at):
                self.prefill.crash(life, at, lingers=move[0] == "hang")
            case ("lingerer dies", at, epoch):
                self.prefill.writing.lingerer_dies(life, at, epoch)
            case _:
                raise AssertionError(f"no such move: {move}")

    def _deliver(self, life: Life, to: int, number: int) -> None:
        if to == DECODE:
            self.decode.deliver(life, number)
        else:
            self.prefill.deliver(life, to, number)

    def _answer(self, life: Life, item: Move) -> None:
        match item:
            case ("verify", *_):
                self.decode.verify(life, item)
            case ("commit", attempt, blocks):
                self.decode.commit(life, attempt, blocks)
            case ("quiet", attempt, lane):
                self.decode.quiet(life, attempt, lane)
            case ("opened", attempt, lane):
                self.decode.opened(life, attempt, lane)
            case ("receiver link lost", attempt):
                self.decode.tell(life, attempt, ev.LinkLost(reason="gone"))
            case ("sender link lost", at, attempt):
                self.prefill.tell(life, at, attempt, ev.LinkLost(reason="gone"))
            case ("submit", at, attempt):
                self.prefill.submit(life, at, attempt, accepted=True)
            case ("write failed", at, attempt, seq, rewrite):
                self.prefill.write_failed(life, at, attempt, seq, rewrite)
            case ("writes quiet", at, attempt):
                self.prefill.writes_quiet(life, at, attempt)

    def _cut(self, life: Life, at: int) -> None:
        """The link ends: what is on it is lost, and each side notices in its own time."""
        epoch = life.workers[at].epoch
        mine = self.names.prefill(at, epoch)
        envelopes = self.names.envelopes.values
        life.messages = {
            (to, number) for to, number in life.messages if to != at and envelopes[number].incarnation != mine
        }
        for attempt in life.receivers:
            if life.routed_to(attempt) == (at, epoch):
                life.owed.add(("receiver link lost", attempt))
        sender = life.workers[at].sender
        if sender is not None:
            life.owed.add(("sender link lost", at, sender.attempt))


def bends(envelope: HandoffEnvelope, scope: Scope) -> list[HandoffEnvelope]:
    """Return every alteration of a message, as a broken or hostile peer could send it, that some guard refuses.

    What only its sender can know is left alone, for no receiver can check it: that it has drained, or that a write is
    done.
    """
    return [replace(envelope, body=body) for body in _bodies(envelope.body, scope)]


def _bodies(body: Body, scope: Scope) -> list[Body]:
    num_chunks, num_units = scope.num_chunks, scope.num_units
    match body:
        case Offer():
            other_sizes = [replace(body, num_units=body.num_units + more) for more in (-1, num_units)]
            return [*other_sizes, replace(body, tail_hash=OTHER_TAIL)]
        case Reserve():
            fewer = [replace(body, more_grants=body.more_grants[1:])] if body.more_grants else []
            return [replace(body, num_units=body.num_units - 1), *fewer, CommitAck()]
        case Chunk():
            cells = body.cells
            outside = replace(cells, first_unit=cells.first_unit + num_units)
            above = replace(cells, first_layer=cells.first_layer + scope.num_layers)
            beside = [replace(body, lane=(body.lane + 1) % scope.num_lanes)] if scope.num_lanes > 1 else []
            moved = replace(cells, first_unit=(cells.first_unit + 1) % num_units)
            lifted = replace(cells, first_layer=(cells.first_layer + 1) % scope.num_layers)
            return [
                *(replace(body, cells=other) for other in (outside, above, moved, lifted) if other != cells),
                replace(body, cells=replace(cells, num_units=0)),
                replace(body, lane=body.lane + scope.num_lanes),
                *beside,
                replace(body, seq=body.seq + num_chunks),
                replace(body, seq=(body.seq + 1) % num_chunks),
            ]
        case Seal():
            return [
                replace(body, num_chunks=body.num_chunks - 1),
                replace(body, num_chunks=body.num_chunks + 1),
                replace(body, tail_hash=OTHER_TAIL),
            ]
        case Nack():
            return [replace(body, rewrite=body.rewrite + 1), replace(body, seq=body.seq + num_chunks)]
        case _:
            return []
