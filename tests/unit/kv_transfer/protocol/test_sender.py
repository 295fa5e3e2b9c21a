"""The prefill worker's half of a hand-off, message by message."""

from dataclasses import replace

import pytest

from kv_transfer.layout.chunk_plan import HandoffSize
from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import (
    Abort,
    Body,
    CommitAck,
    Nack,
    Offer,
    PrefillJob,
    Reserve,
)
from kv_transfer.protocol.sender import Sender, SenderPlan
from kv_transfer.protocol.states import HandoffState
from tandem.errors import DeadlineExceeded, TransferError
from tandem.values.ids import BlockId
from tandem.values.outputs import PhaseTimes
from tests.support.kv_transfer.halves import BLOCKS, FETCH, JOB, KEY, LAYOUT, OWN, PEER, TOKEN, Half, kinds


def sending(
    job: PrefillJob = JOB,
    *,
    window: int = 2,
    unit_tokens: int = LAYOUT.block_size,
    chunk_bytes: int = 20,
    lanes: tuple[HandoffSize, ...] = (HandoffSize(num_layers=2, num_heads=2, unit_layer_bytes=10),),
) -> Half:
    plan = SenderPlan(
        key=KEY,
        own=OWN,
        peer=PEER,
        job=job,
        block_size=LAYOUT.block_size,
        unit_tokens=unit_tokens,
        whole_tokens=max(LAYOUT.block_size, unit_tokens),
        lanes=lanes,
        lease_s=2.0,
        stall_s=30.0,
        queue_s=600.0,
        chunk_bytes=chunk_bytes,
        write_window=window,
        max_rewrites=1,
    )
    half = Half(Sender(plan, 0.0))
    assert kinds(half.machine.start()) == ["SubmitPrefill"]
    return half


def offered(**options: object) -> Half:
    half = sending(**options)
    half.see(ev.Submitted())
    assert kinds(half.see(ev.PrefillScheduled(queue_s=0.0, tail_hash=None))) == ["Offer"]
    return half


def progress(num_tokens: int) -> ev.KVComputed:
    return ev.KVComputed(num_computed_tokens=num_tokens, blocks=BLOCKS)


FINISHED = ev.PrefillFinished(cached_tokens=0, times=PhaseTimes(), tail_hash=None)
RESERVE = Reserve(num_units=3, transport="x", grant=b"g")


def written(half: Half, seq: int, rewrite: int = 0) -> act.Actions:
    return half.see(ev.Written(seq=seq, rewrite=rewrite, checksum=1, seconds=0.5))


def test_sender_writes_whole_blocks_then_partial_last_one() -> None:
    half = offered()
    assert half.see(progress(5)) == (), "nothing before a grant"
    [first] = half.hear(RESERVE)
    assert (first.seq, first.sources) == (0, BLOCKS[:1])
    [second] = half.see(progress(9))
    assert second.sources == BLOCKS[1:2]
    assert half.see(progress(10)) == (), "the window is full"
    assert kinds(half.see(ev.FirstTokenSampled(first_token=TOKEN))) == ["FirstToken"]
    assert kinds(half.see(FINISHED)) == ["Seal"]
    assert kinds(written(half, 0)) == ["Chunk", "StartWrite"]
    assert kinds(written(half, 1)) == ["Chunk"]
    assert kinds(written(half, 2)) == ["Chunk"]
    assert half.hear(CommitAck()) == (act.ReleaseSources(),)
    assert half.state is HandoffState.CLOSED


def coming(num_tokens: int, coming_tokens: int, num_layers: int) -> ev.KVComputed:
    return ev.KVComputed(
        num_computed_tokens=num_tokens, blocks=BLOCKS, coming_tokens=coming_tokens, num_layers=num_layers
    )


def test_sender_writes_layers_of_step_in_progress() -> None:
    half = offered(window=8, chunk_bytes=30)
    half.hear(RESERVE)
    [first] = half.see(coming(0, 10, 1))
    assert (first.cells.first_layer, first.cells.num_layers, first.cells.num_units) == (0, 1, 3)
    assert (first.first_block, first.sources) == (0, BLOCKS)
    [rest] = half.see(progress(10))
    assert (rest.cells.first_layer, rest.cells.num_layers, rest.cells.num_units) == (1, 1, 3)
    assert kinds(half.see(FINISHED)) == ["Seal"]


def test_sender_partly_filled_block_waits_for_its_step() -> None:
    half = offered(window=8, chunk_bytes=10)
    half.hear(RESERVE)
    [only] = half.see(coming(0, 6, 1))
    assert (only.cells.first_unit, only.cells.num_units, only.sources) == (0, 1, BLOCKS[:1])


def test_sender_counts_cells_in_the_smaller_block() -> None:
    """The peer's blocks hold two tokens, and it holds six already: the first block here is read from its middle."""
    half = offered(job=replace(JOB, held_tokens=6), window=8, unit_tokens=2)
    assert half.see(progress(8)) == ()
    [first] = half.hear(Reserve(num_units=2, transport="x", grant=b"g"))
    assert (first.cells.first_unit, first.cells.num_units, first.first_block, first.sources) == (0, 1, 1, BLOCKS[1:2])
    [second] = half.see(progress(10))
    assert (second.cells.first_unit, second.first_block, second.sources) == (1, 2, BLOCKS[2:])


def test_sender_late_reservation_sends_everything_computed() -> None:
    half = offered(window=8)
    half.see(progress(10))
    half.see(FINISHED)
    assert kinds(half.hear(RESERVE)) == ["StartWrite"] * 3 + ["Seal"]
    assert half.hear(RESERVE) == ()


def test_sender_held_prefix_is_not_sent() -> None:
    half = offered(job=replace(JOB, held_tokens=8))
    half.see(progress(10))
    [write] = half.hear(replace(RESERVE, num_units=1))
    assert write.sources == BLOCKS[2:]


def test_sender_reads_blocks_first_reported() -> None:
    half = offered()
    half.see(progress(4))
    half.see(ev.KVComputed(num_computed_tokens=8, blocks=(BlockId(90), BlockId(91), BlockId(92))))
    writes = half.hear(RESERVE)
    assert [w.sources for w in writes] == [BLOCKS[:1], (BlockId(91),)]


def test_sender_nack_is_answered_once_and_bounded() -> None:
    half = offered(window=8)
    half.see(progress(10))
    half.hear(RESERVE)
    assert half.hear(Nack(seq=0, rewrite=0)) == (), "not announced yet"
    written(half, 0)
    [again] = half.hear(Nack(seq=0, rewrite=0))
    assert (again.seq, again.rewrite) == (0, 1)
    assert half.hear(Nack(seq=0, rewrite=0)) == (), "repeated: would write over verified cells"
    written(half, 0, rewrite=1)
    assert kinds(half.hear(Nack(seq=0, rewrite=1)))[0] == "Abort"


@pytest.mark.parametrize("bad", [Nack(seq=7, rewrite=0), CommitAck(), Offer(num_units=1, queue_s=0.0, tail_hash=None)])
def test_sender_protocol_violation_aborts_attempt(bad: Body) -> None:
    half = offered()
    half.hear(RESERVE)
    assert kinds(half.hear(bad)) == ["Abort", "AbortPrefill", "CancelWrites"]
    assert kinds(half.see(ev.WritesQuiet())) == ["Drained", "ReleaseSources"]


def test_sender_keeps_sources_while_reads_run() -> None:
    half = offered()
    half.see(progress(10))
    half.hear(RESERVE)
    assert kinds(half.hear(Abort(reason="left"))) == ["AbortPrefill", "CancelWrites"]
    assert half.state is HandoffState.ABORTING
    assert half.hear(Abort(reason="left")) == ()
    assert kinds(half.see(ev.WritesQuiet())) == ["Drained", "ReleaseSources"]
    assert half.see(ev.WriteFailed(seq=0, rewrite=0, reason="cancelled")) == ()


def test_sender_abort_before_engine_answer_waits_for_it() -> None:
    half = sending()
    assert half.hear(Abort(reason="left")) == ()
    assert kinds(half.see(ev.Submitted())) == ["AbortPrefill", "Drained", "ReleaseSources"]
    half = sending()
    half.hear(Abort(reason="left"))
    refused = ev.SubmitRefused(failure=ev.Failure(kind=TransferError, message="full"))
    assert kinds(half.see(refused)) == ["Drained"]
    assert kinds(sending().see(refused)) == ["Reject"]


def test_sender_silent_receiver_loses_its_hold() -> None:
    half = offered()
    half.machine.renew(1.0)
    assert half.machine.on_timer(2.5) == ()
    assert kinds(half.machine.on_timer(3.1)) == ["Abort", "AbortPrefill", "Drained", "ReleaseSources"]


def test_sender_engine_abort_is_reported_with_its_error() -> None:
    half = offered()
    failed = ev.PrefillFailed(failure=ev.Failure(kind=TransferError, message="no"))
    assert kinds(half.see(failed)) == ["Reject", "Drained", "ReleaseSources"]


def test_sender_prompt_past_its_deadline_is_given_up() -> None:
    half = offered(job=replace(JOB, timeout_s=1.0))
    half.machine.renew(0.9)
    assert half.machine.on_timer(0.9) == ()
    [reject, *rest] = half.machine.on_timer(1.0)
    assert reject.body.failure.kind is DeadlineExceeded
    assert kinds(tuple(rest)) == ["AbortPrefill", "Drained", "ReleaseSources"]
    half = offered(job=replace(JOB, timeout_s=1.0))
    half.hear(RESERVE)
    assert kinds(half.machine.on_timer(1.0)) == ["Abort", "AbortPrefill", "CancelWrites"], "a grant must be drained"
    assert offered().machine.on_timer(1.0) == ()


def test_sender_chunk_reports_write_duration() -> None:
    half = offered()
    half.see(progress(4))
    half.hear(RESERVE)
    [sent] = written(half, 0)
    assert sent.body.write_s == 0.5


def test_sender_keeps_sources_until_unstoppable_reads_end() -> None:
    half = offered()
    half.see(progress(10))
    half.hear(RESERVE)
    assert kinds(half.hear(Abort(reason="left"))) == ["AbortPrefill", "CancelWrites"]
    assert half.see(ev.WritesEnding()) == ()
    assert half.see(ev.WriteFailed(seq=1, rewrite=0, reason="cancelled")) == ()
    assert kinds(half.see(ev.Written(seq=0, rewrite=0, checksum=0, seconds=0.1))) == ["Drained", "ReleaseSources"]


def test_sender_fetch_sends_whole_blocks_of_both_workers() -> None:
    half = sending(job=replace(FETCH, held_tokens=8), window=8, unit_tokens=2, chunk_bytes=1000)
    half.see(ev.Submitted())
    [offer] = half.see(ev.PrefillScheduled(queue_s=0.0, tail_hash=FETCH.names[0], num_tokens=19))
    assert offer.body.num_units == 4, "of 19 tokens 16 are whole blocks, and 8 are held there"
    blocks = tuple(BlockId(i) for i in range(20, 24))
    half.see(ev.KVComputed(num_computed_tokens=16, blocks=blocks))
    half.see(ev.PrefillFinished(cached_tokens=16, times=PhaseTimes(), tail_hash=FETCH.names[0]))
    [write, seal] = half.hear(Reserve(num_units=4, transport="x", grant=b"g"))
    assert (write.first_block, write.sources) == (2, blocks[2:])
    assert seal.body.num_chunks == 1


def test_sender_fetch_of_nothing_new_is_refused() -> None:
    half = sending(job=replace(FETCH, held_tokens=16))
    half.see(ev.Submitted())
    actions = half.see(ev.PrefillScheduled(queue_s=0.0, tail_hash=None, num_tokens=16))
    assert kinds(actions) == ["Reject", "AbortPrefill", "Drained", "ReleaseSources"]
    assert half.state is HandoffState.CLOSED
