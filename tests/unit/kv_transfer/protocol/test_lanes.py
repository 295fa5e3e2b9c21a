"""Both halves of a hand-off that goes through several lanes, message by message."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.layout.lanes import Lane, lanes_between
from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.handoff_retry import HandoffRetry
from kv_transfer.protocol.messages import Abort, Chunk, Drained, Nack, Offer, Reserve, Seal
from kv_transfer.protocol.states import HandoffState
from tandem.values.ids import NO_BLOCK, BlockId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import PhaseTimes
from tests.support.kv_transfer.halves import BLOCKS, JOB, LAYOUT, OWN, PEER, SETTINGS, TOKEN, Half, kinds
from tests.unit.kv_transfer.protocol.test_sender import FINISHED, offered, progress, written

PRIVATE = replace(LAYOUT, tp_size=2, num_regions=2)
LANES = lanes_between(PRIVATE, PRIVATE)


def receiving() -> Half:
    half = Half(HandoffRetry(JOB, own=OWN, layout=PRIVATE, settings=SETTINGS).begin(1, PEER, 0.0))
    half.machine.start(PRIVATE.block_size, LANES)
    half.hear(Offer(num_units=3, queue_s=0.0, tail_hash=None))
    half.see(ev.BlocksBound(blocks=BLOCKS))
    return half


def opened(lane: int, *, drain_proves_quiet: bool = False) -> ev.GrantOpened:
    return ev.GrantOpened(transport=f"x{lane}", grant=b"g%d" % lane, drain_proves_quiet=drain_proves_quiet, lane=lane)


def reserved(*drains: int) -> Half:
    half = receiving()
    for lane in (1, 0):
        half.see(opened(lane, drain_proves_quiet=lane in drains))
    return half


def chunk(seq: int, lane: int, first_unit: int, num_units: int = 1) -> Chunk:
    cells = CellRange(
        first_layer=0, num_layers=2, first_unit=first_unit, num_units=num_units, first_head=lane, num_heads=1
    )
    return Chunk(seq=seq, rewrite=0, cells=cells, checksum=seq, write_s=0.5, lane=lane)


def land(half: Half, *chunks: Chunk) -> act.Actions:
    actions: act.Actions = ()
    for one in chunks:
        assert half.hear(one) == (act.Verify(chunk=one),)
        actions = half.see(ev.Verified(seq=one.seq, rewrite=0, intact=True))
    return actions


def seal(num_chunks: int) -> Seal:
    return Seal(num_chunks=num_chunks, cached_tokens=4, times=PhaseTimes(), tail_hash=None)


def test_receiver_reserves_once_every_lane_is_open() -> None:
    half = receiving()
    assert half.see(opened(1)) == ()
    [reserve] = half.see(opened(0))
    assert reserve.body == Reserve(num_units=3, transport="x0", grant=b"g0", more_grants=(b"g1",))


def test_receiver_refuses_what_comes_before_every_lane_is_open() -> None:
    half = receiving()
    half.see(opened(0))
    assert kinds(half.hear(chunk(0, 0, 0)))[:2] == ["Abort", "ReportFailed"]


def test_receiver_commits_when_every_lane_is_complete() -> None:
    half = reserved()
    half.hear(TOKEN)
    assert land(half, chunk(0, 0, 0, 3), chunk(1, 1, 0, 2)) == ()
    assert half.hear(seal(3)) == ()
    assert kinds(land(half, chunk(2, 1, 2))) == ["Commit"]
    assert kinds(half.see(ev.Committed())) == ["CommitAck", "Revoke"]


def test_receiver_does_not_commit_what_one_lane_says_twice() -> None:
    half = reserved()
    half.hear(TOKEN)
    land(half, chunk(0, 0, 0, 3))
    assert kinds(half.hear(replace(chunk(1, 0, 0, 3), lane=0)))[:2] == ["Abort", "ReportFailed"]


@pytest.mark.parametrize(
    "bad", [chunk(0, 2, 0), replace(chunk(0, 0, 0), lane=1), replace(chunk(0, 1, 0), lane=0)], ids=("none", "0", "1")
)
def test_receiver_refuses_chunks_of_other_lanes(bad: Chunk) -> None:
    assert kinds(reserved().hear(bad))[:2] == ["Abort", "ReportFailed"]


def test_receiver_keeps_the_blocks_that_all_lanes_have() -> None:
    half = reserved()
    land(half, chunk(0, 0, 0, 2), chunk(1, 1, 0), chunk(2, 1, 2))
    [report] = [a for a in half.see(ev.LinkLost(reason="gone")) if isinstance(a, act.ReportFailed)]
    assert report.landed == BLOCKS[:1]


@pytest.mark.parametrize("first", [0, 1])
def test_receiver_frees_nothing_until_every_lane_is_quiet(first: int) -> None:
    half = reserved()
    assert "Revoke" in kinds(half.see(ev.LinkLost(reason="gone")))
    assert half.see(ev.Quiet(lane=first)) == ()
    assert half.see(ev.Quiet(lane=first)) == (), "a second proof of one lane is none of the other"
    half.now = SETTINGS.drain_s
    assert half.machine.on_timer(half.now) == (act.Quarantine(blocks=BLOCKS),)
    assert half.see(ev.Quiet(lane=1 - first)) == (act.ReleaseBlocks(blocks=BLOCKS),)
    assert half.state is HandoffState.CLOSED


def test_receiver_takes_drained_as_proof_of_the_lanes_that_say_so() -> None:
    half = reserved(1)
    half.see(ev.LinkLost(reason="gone"))
    assert half.hear(Drained()) == ()
    assert half.see(ev.Quiet(lane=0)) == (act.ReleaseBlocks(blocks=BLOCKS),)


def test_receiver_given_up_while_a_lane_opens_never_reserves() -> None:
    half = receiving()
    half.see(opened(0))
    assert kinds(half.see(ev.HandoffCancelled(reason="left"))) == ["Abort", "Revoke"]
    assert half.see(opened(1)) == ()
    assert half.see(ev.Quiet(lane=0)) == ()
    assert half.see(ev.Quiet(lane=1)) == (act.ReleaseBlocks(blocks=BLOCKS),)


def sizes(lanes: tuple[Lane, ...]) -> tuple[HandoffSize, ...]:
    return tuple(
        HandoffSize(
            num_layers=lane.num_layers,
            num_heads=lane.num_heads,
            unit_layer_bytes=10 * lane.num_heads,
            first_layer=lane.first_layer,
            first_head=lane.first_head,
        )
        for lane in lanes
    )


GRANTED = Reserve(num_units=3, transport="x", grant=b"g", more_grants=(b"h",))


def test_sender_writes_through_all_lanes_at_once() -> None:
    half = offered(lanes=sizes(LANES), window=1)
    half.see(progress(10))
    writes = half.hear(GRANTED)
    assert [(w.seq, w.lane, w.cells.first_head) for w in writes] == [(0, 0, 0), (3, 1, 1)]
    [said, following] = written(half, 3)
    assert said.body.lane == 1
    assert (following.lane, following.seq) == (1, 4), "each lane has a window of its own"
    assert kinds(half.see(FINISHED)) == ["Seal"]


def test_sender_refuses_grants_of_other_lanes() -> None:
    half = offered(lanes=sizes(LANES))
    half.see(progress(10))
    for wrong in ((), (b"h", b"i")):
        assert kinds(half.hear(replace(GRANTED, more_grants=wrong)))[:1] in (["Abort"], [])


def test_sender_rewrites_in_the_same_lane() -> None:
    half = offered(lanes=sizes(LANES), window=1)
    half.see(progress(10))
    half.hear(GRANTED)
    written(half, 3)
    [again] = half.hear(Nack(seq=3, rewrite=0))
    assert (again.lane, again.seq, again.rewrite) == (1, 3, 1)


def test_sender_closes_when_no_lane_reads() -> None:
    half = offered(lanes=sizes(LANES))
    half.see(progress(10))
    half.hear(GRANTED)
    assert "CancelWrites" in kinds(half.hear(Abort(reason="x")))
    assert half.see(ev.WritesEnding()) == ()
    under_way = [key for key in ((0, 0), (1, 0), (3, 0), (4, 0))]
    for seq, rewrite in under_way:
        done = half.see(ev.WriteFailed(seq=seq, rewrite=rewrite, reason="stopped"))
    assert kinds(done) == ["Drained", "ReleaseSources"]


@given(
    sizes_of=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4, 8))),
    num_layers=st.integers(1, 6),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    chunk_bytes=st.integers(1, 400),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_planners_of_all_lanes_cover_every_lane_once(sizes_of, num_layers, steps, chunk_bytes) -> None:
    """As the layers of each step are told one by one."""
    here, there, heads = sizes_of
    layouts = [
        KVLayout(
            model_fingerprint="m",
            dtype="float32",
            num_layers=num_layers,
            num_kv_heads=heads,
            head_dim=1,
            block_size=4,
            tp_size=tp,
            num_regions=tp,
        )
        for tp in (here, there)
    ]
    lanes, total = lanes_between(*layouts), sum(steps)
    for lane, size in zip(lanes, sizes(lanes), strict=True):
        planner, coverage = ChunkPlanner(size, chunk_bytes=chunk_bytes), Coverage(num_units=total, lane=lane)
        done = 0
        for step in steps:
            for layer in range(num_layers + 1):
                early = planner.plan(done, coming=done + step, num_layers=layer)
                assert all(cells.first_layer + cells.num_layers <= layer for cells in early if cells.first_unit >= done)
                _land(coverage, early)
            done += step
            _land(coverage, planner.plan(done))
        assert coverage.complete


def _land(coverage: Coverage, chunks: list[CellRange]) -> None:
    for cells in chunks:
        assert coverage.contains(cells)
        assert not coverage.claimed(cells)
        coverage.claim(cells)
        coverage.land(cells)


WINDOWED = replace(LAYOUT, windowed_layers=(1,), window=5)
WINDOW = (NO_BLOCK, BlockId(11), BlockId(12))


def test_receiver_counts_the_blocks_of_windows_as_leased() -> None:
    half = Half(HandoffRetry(JOB, own=OWN, layout=WINDOWED, settings=SETTINGS).begin(1, PEER, 0.0))
    half.machine.start(WINDOWED.block_size, lanes_between(WINDOWED, WINDOWED))
    half.hear(Offer(num_units=3, queue_s=0.0, tail_hash=None))
    half.see(ev.BlocksBound(blocks=BLOCKS, windows=(WINDOW,)))
    assert half.machine.num_leased_blocks == 5
    for lane in (0, 1):
        half.see(opened(lane))
    half.see(ev.LinkLost(reason="gone"))
    half.now = SETTINGS.drain_s
    assert kinds(half.machine.on_timer(half.now)) == ["Quarantine"]
    assert half.machine.num_leased_blocks == 5
    for lane in (0, 1):
        half.see(ev.Quiet(lane=lane))
    assert half.machine.num_leased_blocks == 0


def test_sender_counts_the_blocks_of_windows_as_pinned() -> None:
    lanes = tuple(
        HandoffSize(num_layers=1, num_heads=2, unit_layer_bytes=10, first_layer=group, group=group, first_unit=group)
        for group in (0, 1)
    )
    half = offered(lanes=lanes)
    half.see(ev.KVComputed(num_computed_tokens=10, blocks=BLOCKS, windows=(WINDOW,)))
    assert half.machine.num_pinned_blocks == 5
