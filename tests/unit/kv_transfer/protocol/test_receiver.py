"""The decode worker's half of a hand-off, message by message, with each guard's refusals."""

from dataclasses import replace

import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.handoff_retry import HandoffRetry
from kv_transfer.protocol.messages import (
    Abort,
    Body,
    Chunk,
    CommitAck,
    Drained,
    FirstToken,
    Nack,
    Offer,
    PrefillJob,
    Reserve,
    Seal,
)
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import HandoffState
from tandem.errors import InvariantError, TransferError
from tandem.values.ids import BlockHash, BlockId, Incarnation, TransferId
from tandem.values.outputs import PhaseTimes, SampledToken
from tests.support.kv_transfer.halves import BLOCKS, FETCH, JOB, KEY, LAYOUT, OWN, PEER, SETTINGS, TOKEN, Half, kinds


def cell_range(
    first: int, count: int, first_layer: int = 0, num_layers: int = 2, heads: tuple[int, int] = (0, 2)
) -> CellRange:
    return CellRange(
        first_layer=first_layer,
        num_layers=num_layers,
        first_unit=first,
        num_units=count,
        first_head=heads[0],
        num_heads=heads[1],
    )


def chunk(seq: int, cells: CellRange | None = None, rewrite: int = 0) -> Chunk:
    return Chunk(seq=seq, rewrite=rewrite, cells=cells or cell_range(seq, 1), checksum=seq, write_s=0.5)


def offer(num_units: int = 3, *, queue_s: float = 0.0, tail_hash: BlockHash | None = None) -> Offer:
    return Offer(num_units=num_units, queue_s=queue_s, tail_hash=tail_hash)


def seal(num_chunks: int = 3, tail_hash: bytes | None = None) -> Seal:
    return Seal(num_chunks=num_chunks, cached_tokens=4, times=PhaseTimes(), tail_hash=tail_hash)


def receiving(job: PrefillJob = JOB, settings: TransferSettings = SETTINGS) -> Half:
    return Half(HandoffRetry(job, own=OWN, layout=LAYOUT, settings=settings).begin(1, PEER, 0.0))


def reserved(job: PrefillJob = JOB, *, drain_proves_quiet: bool = True) -> Half:
    half = receiving(job)
    half.hear(offer(tail_hash=job.tail_hash))
    half.see(ev.BlocksBound(blocks=BLOCKS))
    half.see(ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=drain_proves_quiet))
    return half


def verify(half: Half, seq: int, *, intact: bool = True, rewrite: int = 0) -> act.Actions:
    return half.see(ev.Verified(seq=seq, rewrite=rewrite, intact=intact))


def test_receiver_messages_in_order_commits() -> None:
    half = receiving()
    assert kinds(half.machine.start(LAYOUT.block_size)) == ["Prefill"]
    assert half.hear(offer(3, queue_s=0.5)) == (act.BindBlocks(num_blocks=3),)
    assert half.see(ev.BlocksBound(blocks=BLOCKS)) == (act.OpenGrant(blocks=BLOCKS),)
    opened = half.see(ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=True))
    assert opened == (act.SendMessage(body=Reserve(num_units=3, transport="x", grant=b"g")),)
    assert half.hear(TOKEN) == (act.ForwardFirstToken(first_token=TOKEN),)
    assert half.hear(chunk(1)) == (act.Verify(chunk=chunk(1)),)
    assert half.hear(seal()) == (), "a SEAL may overtake chunks"
    half.now = 2.0
    for seq in (0, 2):
        half.hear(chunk(seq))
        assert verify(half, seq) == ()
    [commit] = verify(half, 1)
    assert commit.info.blocks == BLOCKS
    assert commit.info.times.transfer_s == 2.0
    assert kinds(half.see(ev.Committed())) == ["CommitAck", "Revoke"]
    assert half.state is HandoffState.CLOSED


def test_receiver_exposed_time_is_without_the_senders_fetches() -> None:
    half = reserved()
    half.hear(TOKEN)
    for seq in range(2):
        half.hear(chunk(seq))
        verify(half, seq)
    half.hear(replace(seal(), times=PhaseTimes(transfer_s=3.0)))
    half.hear(chunk(2))
    half.now = 0.5
    [commit] = verify(half, 2)
    assert commit.info.exposed_s == 0.5
    assert commit.info.times.transfer_s == 3.5


@pytest.mark.parametrize("missing", ["token", "seal", "chunk"])
def test_receiver_incomplete_handoff_never_commits(missing: str) -> None:
    half = reserved()
    for seq in range(2 if missing == "chunk" else 3):
        half.hear(chunk(seq))
        assert "Commit" not in kinds(verify(half, seq))
    if missing != "token":
        half.hear(TOKEN)
    if missing != "seal":
        half.hear(seal())
    assert half.state in (HandoffState.STREAMING, HandoffState.SEALED)
    last = {"token": TOKEN, "seal": seal(), "chunk": chunk(2)}[missing]
    actions = half.hear(last) if missing != "chunk" else (half.hear(last), verify(half, 2))[1]
    assert kinds(actions)[-1] == "Commit"


def test_receiver_stale_messages_do_nothing() -> None:
    half = reserved()
    assert half.hear(chunk(0), key=replace(KEY, attempt=2)) == ()
    assert half.hear(chunk(0), key=replace(KEY, transfer_id=TransferId("other"))) == ()
    assert half.hear(chunk(0), peer=Incarnation(8)) == ()
    assert half.hear(chunk(0), to=Incarnation(8)) == (), "meant for the process that was here before"
    assert half.state is HandoffState.RESERVED


def test_receiver_repeated_messages_do_nothing() -> None:
    half = reserved()
    assert half.hear(offer(3, queue_s=0.0)) == ()
    half.hear(chunk(0))
    assert half.hear(chunk(0)) == ()
    verify(half, 0)
    assert half.hear(chunk(0)) == ()
    assert verify(half, 0, intact=False) == ()
    half.hear(TOKEN)
    assert half.hear(FirstToken(token=SampledToken(token_id=2), cached_tokens=0)) == ()
    half.hear(seal())
    assert half.hear(seal()) == ()
    assert half.state is HandoffState.SEALED


@pytest.mark.parametrize(
    "bad",
    [
        chunk(0, cell_range(2, 2)),
        chunk(0, cell_range(0, 1, num_layers=3)),
        chunk(0, cell_range(0, 1, first_layer=2, num_layers=1)),
        chunk(0, cell_range(0, 1, heads=(1, 2))),
        chunk(0, cell_range(1, 1)),
        chunk(99),
        offer(2, queue_s=0.0),
        CommitAck(),
        seal(1000),
        seal(1),
        Abort(reason="no"),
    ],
)
def test_receiver_protocol_violation_ends_attempt_and_keeps_landed_blocks(bad: Body) -> None:
    half = reserved()
    half.hear(chunk(2, cell_range(0, 1)))
    verify(half, 2)
    half.hear(chunk(1))
    if isinstance(bad, Offer):
        half = receiving()
    actions = half.hear(bad)
    [report] = [a for a in actions if isinstance(a, act.ReportFailed)]
    assert report.failure.kind is TransferError
    if not isinstance(bad, Offer):
        assert report.landed == BLOCKS[:1]
        assert half.see(ev.Quiet()) == (act.ReleaseBlocks(blocks=BLOCKS[1:]),)
    assert half.state is HandoffState.CLOSED


@pytest.mark.parametrize("tail_hash", [None, BlockHash(b"x" * 16)])
def test_receiver_offer_of_other_tokens_is_refused_before_binding(tail_hash: BlockHash | None) -> None:
    half = receiving(replace(JOB, tail_hash=BlockHash(b"y" * 16)))
    assert kinds(half.hear(offer(tail_hash=tail_hash))) == ["Abort", "ReportFailed"]
    assert half.state is HandoffState.CLOSED


def test_receiver_failed_attempt_keeps_only_blocks_with_all_units() -> None:
    """The peer's blocks are half as large: cells are counted in those."""
    half = receiving()
    half.machine.start(LAYOUT.block_size // 2)
    assert half.hear(offer(5)) == (act.BindBlocks(num_blocks=3),)
    half.see(ev.BlocksBound(blocks=BLOCKS))
    [reserve] = half.see(ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=True))
    assert reserve.body.num_units == 5
    for seq in range(3):
        half.hear(chunk(seq))
        verify(half, seq)
    [report] = [a for a in half.see(ev.LinkLost(reason="gone")) if isinstance(a, act.ReportFailed)]
    assert report.landed == BLOCKS[:1]


def test_receiver_blocks_of_other_tokens_are_not_kept() -> None:
    half = reserved(replace(JOB, tail_hash=BlockHash(b"y" * 16)))
    half.hear(chunk(2, cell_range(0, 1)))
    verify(half, 2)
    actions = half.hear(seal(3, b"x" * 16))
    [report] = [a for a in actions if isinstance(a, act.ReportFailed)]
    assert report.landed == ()
    assert half.see(ev.Quiet()) == (act.ReleaseBlocks(blocks=BLOCKS),)


def test_receiver_contradicting_seal_is_refused() -> None:
    half = reserved()
    half.hear(seal(3))
    assert "ReportFailed" in kinds(half.hear(seal(2)))


def test_receiver_damaged_chunk_is_requested_again_and_only_rewrite_counts() -> None:
    half = reserved()
    half.hear(chunk(0))
    assert verify(half, 0, intact=False) == (act.SendMessage(body=Nack(seq=0, rewrite=0)),)
    assert half.hear(chunk(0)) == (), "the damaged write, announced again"
    assert kinds(half.hear(chunk(0, rewrite=1))) == ["Verify"]
    assert verify(half, 0, rewrite=0) == (), "a verdict on the damaged write"
    assert "ReportFailed" in kinds(verify(half, 0, intact=False, rewrite=1))


def test_receiver_rewrite_with_another_range_is_refused() -> None:
    half = reserved()
    half.hear(chunk(0))
    verify(half, 0, intact=False)
    assert "ReportFailed" in kinds(half.hear(chunk(0, cell_range(1, 1), rewrite=1)))


def test_receiver_commits_cells_in_any_layer_and_head_order() -> None:
    half = reserved()
    cells = [cell_range(0, 3, layer, 1, (head, 1)) for layer in range(2) for head in range(2)]
    half.hear(TOKEN)
    half.hear(seal(4))
    for seq, part in enumerate(cells):
        half.hear(chunk(seq, part))
        actions = verify(half, seq)
    assert kinds(actions) == ["Commit"]


def test_receiver_keeps_destinations_until_writer_is_quiet() -> None:
    half = reserved()
    assert kinds(half.see(ev.HandoffCancelled(reason="left"))) == ["Abort", "Revoke"]
    assert half.state is HandoffState.ABORTING
    assert half.hear(Drained(), peer=Incarnation(8)) == (), "another process's word is no proof"
    assert half.hear(Drained()) == (act.ReleaseBlocks(blocks=BLOCKS),)


def test_receiver_drained_is_no_proof_with_bytes_in_flight() -> None:
    half = reserved(drain_proves_quiet=False)
    half.see(ev.LinkLost(reason="gone"))
    assert half.hear(Drained()) == ()
    assert half.see(ev.Quiet()) == (act.ReleaseBlocks(blocks=BLOCKS),)


def test_receiver_unproven_writer_quarantines_blocks() -> None:
    half = reserved()
    half.see(ev.LinkLost(reason="gone"))
    assert half.machine.on_timer(0.5) == ()
    assert half.machine.on_timer(1.5) == (act.Quarantine(blocks=BLOCKS),)
    assert half.state is HandoffState.QUARANTINED
    assert kinds(half.machine.on_timer(5.0)) == ["Abort"], "requested again"
    assert half.hear(Drained()) == (act.ReleaseBlocks(blocks=BLOCKS),)


def test_receiver_cancel_while_binding_releases_blocks() -> None:
    half = receiving()
    half.hear(offer(3, queue_s=0.0))
    assert kinds(half.see(ev.HandoffCancelled(reason="left"))) == ["Abort"]
    assert half.see(ev.BlocksBound(blocks=BLOCKS)) == (act.ReleaseBlocks(blocks=BLOCKS),)
    with pytest.raises(InvariantError):
        half.see(ev.BlocksBound(blocks=BLOCKS))


def test_receiver_silence_and_standstill_end_handoff() -> None:
    half = receiving()
    [abort, report] = half.machine.on_timer(2.1)
    assert isinstance(abort.body, Abort)
    assert report.expired
    half = reserved()
    for now in range(1, 30):
        half.machine.renew(float(now))
        assert half.machine.on_timer(float(now)) == ()
    half.machine.renew(30.5)
    assert "ReportFailed" in kinds(half.machine.on_timer(30.5))


def test_handoff_retry_keeps_landed_blocks_and_first_token() -> None:
    ladder = HandoffRetry(JOB, own=OWN, layout=LAYOUT, settings=SETTINGS)
    ladder.begin(1, PEER, 0.0)
    with pytest.raises(TransferError):
        ladder.begin(2, PEER, 0.0)
    ladder.first_token_known()
    ladder.failed(2, 0.0)
    assert (ladder.job.held_tokens, ladder.job.resume) == (8, True)
    with pytest.raises(TransferError):
        ladder.begin(1, PEER, 0.0)
    assert not ladder.expired(9.0)
    assert ladder.expired(11.0)
    assert ladder.begin(2, PEER, 9.0).plan.job.num_blocks(LAYOUT.block_size) == 1
    ladder.end()
    with pytest.raises(TransferError):
        ladder.begin(3, PEER, 9.0)


def test_fetch_job_never_holds_the_whole_prompt() -> None:
    job = replace(JOB, token_ids=tuple(range(8)), num_prompt_tokens=8)
    assert job.num_blocks(4) == 2
    assert job.num_keepable_blocks(4) == 1


def test_handoff_retry_later_attempt_has_less_time() -> None:
    ladder = HandoffRetry(replace(JOB, timeout_s=10.0), own=OWN, layout=LAYOUT, settings=SETTINGS)
    for attempt, now, left_s in ((1, 5.0, 10.0), (2, 9.0, 6.0), (3, 50.0, 0.0)):
        [ask] = ladder.begin(attempt, PEER, now).start(LAYOUT.block_size)
        assert ask.body.job.timeout_s == left_s
        ladder.failed(0, now)


def test_receiver_fetch_accepts_whole_named_offer() -> None:
    half = receiving(FETCH)
    [ask] = half.machine.start(LAYOUT.block_size)
    assert (ask.body.job.token_ids, ask.body.job.num_tokens) == ((), 48)
    assert half.hear(offer(8, tail_hash=FETCH.names[1])) == (act.BindBlocks(num_blocks=8),)
    blocks = tuple(BlockId(i) for i in range(8))
    half.see(ev.BlocksBound(blocks=blocks))
    [reserve] = half.see(ev.GrantOpened(transport="x", grant=b"g", drain_proves_quiet=True))
    assert reserve.body.num_units == 8
    half.hear(chunk(0, cell_range(0, 8)))
    assert verify(half, 0) == ()
    [commit] = half.hear(seal(1, FETCH.names[1]))
    assert (commit.info.blocks, commit.info.first_token) == (blocks, None)


@pytest.mark.parametrize(
    ("num_units", "tail_hash", "unit_tokens"),
    [(13, FETCH.names[2], 4), (8, FETCH.names[2], 4), (8, None, 4), (3, FETCH.names[0], 2)],
    ids=["more than requested", "another prefix", "no name", "half a block"],
)
def test_receiver_impossible_offer_ends_fetch(num_units: int, tail_hash: BlockHash | None, unit_tokens: int) -> None:
    half = receiving(FETCH)
    half.machine.start(unit_tokens)
    assert kinds(half.hear(offer(num_units, tail_hash=tail_hash))) == ["Abort", "ReportFailed"]
    assert half.state is HandoffState.CLOSED
