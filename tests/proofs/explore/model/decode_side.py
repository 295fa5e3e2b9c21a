"""What a decode worker does for one request: the plainest shell around the real receivers and their ladder."""

from collections import deque
from typing import Any

from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import guards
from kv_transfer.protocol.messages import Abort, Chunk, Failure, Offer, Seal
from kv_transfer.protocol.states import LIVE, HandoffState
from tandem.errors import Unavailable
from tests.proofs.explore.model import properties
from tests.proofs.explore.model.life import (
    DONE,
    LOOSE,
    LOST,
    MOVING,
    NEW,
    OPEN,
    OVER,
    OWNED,
    TORN,
    Life,
    Write,
)
from tests.proofs.explore.model.scope import UNIT_TOKENS, Names
from tests.proofs.explore.model.writing import Writing

BUSY = Failure(kind=Unavailable, message="no blocks")


class DecodeSide:
    """Changes lives as their decode worker would."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._machines = names.machines
        self._writing = Writing(names.scope)

    # The ladder

    def begin(self, life: Life, at: int) -> None:
        """The router names a prefill worker for the next attempt."""
        if life.request == NEW:
            life.request, life.ladder = OPEN, self._names.fresh_ladder
        life.attempt += 1
        epoch = life.workers[at].epoch
        key = ("begin", life.attempt, at, epoch)
        peer = self._names.prefill(at, epoch)
        life.ladder, machine = self._machines.step(
            life.ladder, key, lambda ladder: self._machines.add(ladder.begin(life.attempt, peer, 0.0))
        )
        life.receivers[life.attempt] = (machine, at, epoch)
        lanes = self._names.lanes
        self._step(life, life.attempt, "start", lambda receiver: receiver.start(UNIT_TOKENS, lanes))

    def _ladder(self, life: Life, key: tuple[Any, ...], do: Any) -> None:
        life.ladder, _none = self._machines.step(life.ladder, key, do)

    def ladder_waits(self, life_ladder: int) -> bool:
        """Whether a failed attempt waits for the router."""
        return life_ladder >= 0 and self._machines.get_cached(life_ladder).waiting

    def cancel(self, life: Life, event: bool) -> None:
        """Nobody wants the request any more, or nobody rerouted it in time."""
        life.request = OVER
        self._free_owned(life)
        life.ladder = -1
        if event and life.attempt in life.receivers:
            self.tell(life, life.attempt, ev.HandoffCancelled(reason="left"))

    def _free_owned(self, life: Life) -> None:
        properties.no_writer_into(life, tuple(life.kept), "is given up by the request")
        for block in life.kept:
            properties.given_up_once(life, OWNED, (block,))
            del life.blocks[block]
        life.kept = []

    # Receivers

    def deliver(self, life: Life, number: int) -> None:
        """To every attempt of the hand-off: telling them apart is the machines' business."""
        envelope = self._names.envelopes.values[number]
        mine = self._names.decode(life.decode_epoch)
        if not life.receivers and isinstance(envelope.body, Offer | Chunk | Seal):
            at = self._names.at(envelope.incarnation)
            known = self._names.prefill(at, life.workers[at].epoch) == envelope.incarnation
            if known and not guards.misdirected(envelope, mine):
                answer = Abort(reason="unknown")
                life.messages.add((at, self._names.envelope(mine, envelope.incarnation, envelope.key, answer)))
        for attempt in list(life.receivers):
            key = ("message", number)
            self._step(life, attempt, key, lambda receiver: receiver.on_message(envelope, 0.0))

    def tell(self, life: Life, attempt: int, event: ev.ReceiverEvent) -> None:
        """Something happened to an attempt, if it still exists."""
        if attempt in life.receivers:
            self._step(life, attempt, event, lambda receiver: receiver.on_event(event, 0.0))

    def expire(self, life: Life, attempt: int, beyond: float) -> None:
        """The reaper's visit after all leases have ended."""
        self._step(life, attempt, "expire", lambda receiver: receiver.on_timer(beyond))
        if attempt in life.receivers and live(self._machines.states[life.receivers[attempt][0]]):
            raise properties.Violation(f"attempt {attempt} goes on after its lease has ended")

    def _step(self, life: Life, attempt: int, key: Any, do: Any) -> None:
        queue: deque[tuple[str, Any]] = deque(self._advance(life, attempt, key, do))
        while queue:
            event = self._execute(life, attempt, *queue.popleft())
            if event is not None:
                queue.extend(self._advance(life, attempt, event, lambda r, e=event: r.on_event(e, 0.0)))
        if self._machines.states[life.receivers[attempt][0]] is HandoffState.CLOSED:
            del life.receivers[attempt]

    def _advance(self, life: Life, attempt: int, key: Any, do: Any) -> list[tuple[str, Any]]:
        machine, at, epoch = life.receivers[attempt]
        mine = self._names.decode(life.decode_epoch)
        there = self._names.prefill(at, life.workers[at].epoch)

        def run(receiver: Any) -> list[tuple[str, Any]]:
            return self._names.compiled(
                do(receiver), lambda body: self._names.envelope(mine, there, receiver.plan.key, body)
            )

        machine, actions = self._machines.step(machine, (mine, there, key), run)
        life.receivers[attempt] = (machine, at, epoch)
        return actions

    def _execute(self, life: Life, attempt: int, kind: str, action: Any) -> ev.ReceiverEvent | None:
        match kind:
            case "Send":
                self._send(life, attempt, action)
            case "BindBlocks":
                life.owed.add(("bind", attempt, action.num_blocks))
            case "OpenGrant":
                by_group = (action.blocks, *action.windows)
                for number, lane in enumerate(self._names.lanes):
                    life.grants[attempt, number] = (by_group[lane.group], *life.routed_to(attempt))
                # Regions of other processes answer later, each in its own time.
                life.owed |= {("opened", attempt, lane) for lane in range(1, len(self._names.lanes))}
                return self._opened(0)
            case "Verify":
                chunk = action.chunk
                group = self._names.lanes[chunk.lane].group
                slots = self._names.scope.slots(chunk.cells, life.grants[attempt, chunk.lane][0], group)
                life.owed.add(("verify", attempt, chunk.seq, chunk.rewrite, slots, chunk.checksum))
            case "ForwardFirstToken":
                properties.sampled_once(life)
                life.tokens += 1
                self._ladder(life, ("token",), lambda ladder: ladder.first_token_known())
            case "Commit":
                scope = self._names.scope
                num_needed = None if scope.fetch else scope.num_blocks
                properties.committable(life, action.info, num_needed, needed=self._names.needed)
                life.owed.add(("commit", attempt, action.info.blocks))
            case "Revoke":
                return self._revoke(life, attempt)
            case "ReportFailed":
                self._failed(life, attempt, action)
            case "Quarantine":
                properties.given_up_once(life, attempt, action.blocks)
            case "ReleaseBlocks":
                self._release(life, attempt, action.blocks)
        return None

    def _send(self, life: Life, attempt: int, number: int) -> None:
        at, epoch = life.routed_to(attempt)
        # The link is dialled again, and a question then reaches the successor of whom it was meant for.
        if life.workers[at].epoch == epoch or isinstance(self._names.envelopes.values[number].body, Abort):
            life.messages.add((at, number))

    def _failed(self, life: Life, attempt: int, action: act.ReportFailed) -> None:
        if life.request != OPEN or attempt != life.attempt:
            raise properties.Violation(f"attempt {attempt} reports failure, but its request has moved on")
        properties.given_up_once(life, attempt, action.landed)
        properties.right_content(life, action.landed, len(life.kept), "keeps wrong KV", needed=self._names.needed)
        properties.no_writer_into(life, action.landed, "is kept")
        for block in action.landed:
            life.blocks[block] = (OWNED, life.blocks[block][1])
        life.kept += action.landed
        num_landed = len(action.landed)
        self._ladder(life, ("failed", num_landed), lambda ladder: ladder.failed(num_landed, 0.0))

    def _release(self, life: Life, attempt: int, blocks: tuple[int, ...]) -> None:
        properties.given_up_once(life, attempt, blocks)
        properties.no_writer_into(life, blocks, "is released")
        for block in blocks:
            del life.blocks[block]

    def _revoke(self, life: Life, attempt: int) -> ev.ReceiverEvent | None:
        """The answer of the first lane, if it is known at once; those of regions of other processes are owed."""
        life.grants.pop((attempt, 0), None)
        life.owed |= {("quiet", attempt, lane) for lane in range(1, len(self._names.lanes))}
        writes = self._landing_writes(life, attempt, 0)
        if self._names.scope.shared_memory and writes:
            life.owed.add(("quiet", attempt, 0))
            return None
        for write in writes:
            self._writing.shut_out(life, write)
        return ev.Quiet()

    @staticmethod
    def _landing_writes(life: Life, attempt: int, lane: int) -> list[Write]:
        return [w for w in life.writes if (w.attempt, w.lane) == (attempt, lane) and w.phase in (MOVING, LOOSE)]

    def quiet(self, life: Life, attempt: int, lane: int) -> None:
        """The writers of a lane have answered its revocation, or are proven dead."""
        life.grants.pop((attempt, lane), None)
        for write in self._landing_writes(life, attempt, lane):
            self._writing.shut_out(life, write)
        self.tell(life, attempt, ev.Quiet(lane=lane))

    def opened(self, life: Life, attempt: int, lane: int) -> None:
        """The region of a lane has let its writer in."""
        self.tell(life, attempt, self._opened(lane))

    def _opened(self, lane: int) -> ev.GrantOpened:
        scope = self._names.scope
        proof = scope.shared_memory and not scope.remote
        return ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=proof, lane=lane)

    # Answers to actions

    def bind(self, life: Life, attempt: int, blocks: tuple[int, ...]) -> None:
        """The pool gives destinations."""
        torn = (TORN,) * self._names.scope.block_cells
        for block in blocks:
            life.blocks[block] = (attempt, torn)
        windows = self._names.scope.windows(blocks, len(life.kept))
        self.tell(life, attempt, ev.BlocksBound(blocks=blocks, windows=windows))

    def refuse(self, life: Life, attempt: int) -> None:
        """The pool gives none."""
        self.tell(life, attempt, ev.BindRefused(failure=BUSY))

    def verify(self, life: Life, item: tuple[Any, ...]) -> None:
        """Compare what is in memory now with what the chunk said."""
        _verify, attempt, seq, rewrite, slots, checksum = item
        intact = life.read(slots) == checksum
        self.tell(life, attempt, ev.Verified(seq=seq, rewrite=rewrite, intact=intact))

    def commit(self, life: Life, attempt: int, blocks: tuple[int, ...]) -> None:
        """The sequence joins the batch, decodes and ends, unless its client left meanwhile."""
        properties.given_up_once(life, attempt, blocks)
        properties.no_writer_into(life, blocks, "is decoded from")
        if life.request == OPEN:
            properties.right_content(life, (*life.kept, *blocks), 0, "decodes wrong KV", needed=self._names.needed)
            life.request, life.ladder = DONE, -1
            self._free_owned(life)
        for block in blocks:
            del life.blocks[block]
        self.tell(life, attempt, ev.Committed())

    def crash(self, life: Life) -> None:
        """The process dies and starts again; its memory is another one now, and the hand-off is over."""
        life.decode_epoch += 1
        for at, worker in enumerate(life.workers):
            if worker.sender is not None:
                life.owed.add(("sender link lost", at, worker.sender.attempt))
        self._writing.memory_dies(life)
        life.owed = {
            item for item in life.owed if item[0] in ("write failed", "sender link lost", "writes quiet", "submit")
        }
        life.receivers, life.grants, life.blocks, life.kept = {}, {}, {}, []
        if life.request == OPEN:
            life.request = LOST
        life.ladder = -1


def live(state: HandoffState | None) -> bool:
    """Whether a machine may still commit."""
    return state in LIVE
