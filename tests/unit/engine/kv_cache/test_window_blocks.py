"""Blocks of windowed layers: what a sequence holds, what stays for later ones, and what they cost."""

from dataclasses import replace

import pytest

from engine.kv_cache.lower_tiers import HostTier
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from engine.types.windows import WindowSpec
from kv_transfer.layout.chunk_plan import HandoffSize
from kv_transfer.layout.lanes import lanes_between
from tandem.errors import ConfigError, RequestTooLarge
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import TransferId
from tandem.values.kv_layout import KVLayout
from tests.support.engine import ledger

SPEC = WindowSpec(window=24, num_groups=2, block_size=ledger.BLOCK, ahead_tokens=40)
SIZE = ledger.BLOCK


def scheduler(num_blocks: int = 60, spec: WindowSpec = SPEC) -> Scheduler:
    return Scheduler(ledger.config(num_blocks=num_blocks, windows=spec), BlockHasher(ledger.SECRET))


def run(sched: Scheduler, runner: ledger.LedgerRunner, *requests: Request) -> int:
    """Run requests to their ends, comparing answers. Returns the most blocks that were in use at once."""
    most = 0
    for request in requests:
        sched.add(request)
    while (batch := sched.schedule(0.0)) is not None:
        most = max(most, sched.load().num_used_blocks)
        sched.commit(batch, runner.execute(batch))
        sched.check_invariants()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert [*request.token_ids[request.num_prompt_tokens :]] == ledger.continuation(prompt, request.params)
    return most


@pytest.fixture
def runner() -> ledger.LedgerRunner:
    return ledger.LedgerRunner(window=SPEC.window)


@pytest.mark.parametrize(("window", "ahead"), [(1, 1), (16, 1), (17, 1), (24, 40), (33, 7)])
def test_window_spec_counts_the_sets_of_every_position(window: int, ahead: int) -> None:
    spec = WindowSpec(window=window, num_groups=1, block_size=SIZE, ahead_tokens=ahead)
    needed = [-(-(n + ahead) // SIZE) - spec.first_block(n) for n in range(300)]
    assert max(needed) == spec.most_sets


@pytest.mark.parametrize("num_blocks", [3, 5, 14, 15, 16, 17, 40])
def test_window_spec_longest_sequence_is_the_longest_that_fits(num_blocks: int) -> None:
    longest = SPEC.max_tokens(num_blocks)
    assert SPEC.num_blocks(longest) <= num_blocks < SPEC.num_blocks(longest + 1)


def test_window_spec_refuses_sizes_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="window of windows must be at least 1, not 0"):
        WindowSpec(window=0, num_groups=1, block_size=16, ahead_tokens=1)


@pytest.mark.parametrize(("num_layers", "window"), [(26, 512), (34, 1024), (48, 1024), (62, 1024)], ids=str)
def test_gemma_3_keeps_and_sends_less_than_a_quarter_of_32k_tokens(num_layers: int, window: int) -> None:
    """Its four sizes: every sixth layer attends to everything. Bytes of one KV head, for all are alike."""
    num_tokens, steps = 32_768, 2 * 512
    together = KVLayout(
        model_fingerprint="m", dtype="bfloat16", num_layers=num_layers, num_kv_heads=1, head_dim=256, block_size=16
    )
    windowed = tuple(layer for layer in range(num_layers) if layer % 6 != 5)
    apart = replace(together, windowed_layers=windowed, window=window)
    spec = WindowSpec(window=window, num_groups=len(apart.groups) - 1, block_size=16, ahead_tokens=steps)
    kept = spec.num_blocks(num_tokens) * apart.block_bytes

    def sent_bytes(layout: KVLayout) -> int:
        sizes = [
            HandoffSize.of_lane(
                lane,
                layout,
                num_tokens=num_tokens,
                held_tokens=0,
                unit_tokens=layout.block_size,
                unit_layer_bytes=layout.layer_block_bytes,
            )
            for lane in lanes_between(layout, layout)
        ]
        return sum((num_tokens // 16 - size.first_unit) * size.num_layers * size.unit_layer_bytes for size in sizes)

    sent, all_bytes = sent_bytes(apart), num_tokens // 16 * together.block_bytes
    assert sent_bytes(together) == all_bytes
    assert kept < 0.25 * all_bytes
    assert sent < 0.25 * all_bytes
    print(f"{num_layers} layers: pool {kept / all_bytes:.3f}, wire {sent / all_bytes:.3f}")


def test_scheduler_long_sequence_holds_its_window_only(runner: ledger.LedgerRunner) -> None:
    sched = scheduler()
    most = run(sched, runner, ledger.request([1] * 150))
    token_blocks = -(-158 // SIZE)
    assert most <= token_blocks + SPEC.num_groups * SPEC.most_sets < token_blocks * (1 + SPEC.num_groups)
    ledger.assert_empty(sched)


def test_scheduler_sequence_that_can_never_fit_is_refused() -> None:
    sched = scheduler(num_blocks=SPEC.num_blocks(96))
    with pytest.raises(RequestTooLarge, match="holds 96 tokens"):
        sched.add(ledger.request([1] * 96))


def test_scheduler_next_turn_goes_on_from_the_end_of_the_last(runner: ledger.LedgerRunner) -> None:
    sched = scheduler()
    first = ledger.request([1] * 100)
    run(sched, runner, first)
    second = ledger.request([*first.token_ids, *[2] * 30])
    run(sched, runner, second)
    assert second.num_cached_tokens == (first.num_tokens - 1) // SIZE * SIZE


def test_scheduler_prefix_whose_window_is_gone_is_computed_once_more_and_then_kept(
    runner: ledger.LedgerRunner,
) -> None:
    """The second request finds the common prefix without its window; from then on it is there."""
    sched = scheduler(num_blocks=120)
    prefix = [1] * 96
    found = []
    for own in range(2, 5):
        request = ledger.request([*prefix, *[own] * 60])
        run(sched, runner, request)
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 96]


def test_scheduler_sets_are_evicted_with_their_block_and_alone(runner: ledger.LedgerRunner) -> None:
    sched = scheduler(num_blocks=40)
    for own in range(1, 8):
        run(sched, runner, ledger.request([own] * 100))
    ledger.assert_empty(sched)
    sched.blocks.clear_cache()
    assert sched.blocks.pool.num_free == 40


def test_scheduler_choices_share_the_window_of_their_prompt(runner: ledger.LedgerRunner) -> None:
    """Each has paid for its part: as they go on, none waits for a block, and none is preempted."""
    sched = scheduler(num_blocks=60)
    params = ledger.request([1]).params._replace(max_tokens=60, ignore_eos=True)
    choices = [ledger.request([1] * 70, params=params) for _ in range(4)]
    run(sched, runner, *choices)
    assert [request.num_cached_tokens for request in choices] == [0, 69, 69, 69]
    assert not any(request.num_preemptions for request in choices)


def test_scheduler_windows_exclude_lower_tiers() -> None:
    with pytest.raises(ConfigError, match="lower tiers"):
        Scheduler(ledger.config(windows=SPEC), BlockHasher(ledger.SECRET), tier=HostTier(4), block_bytes=1)


def test_reservation_quarantine_counts_the_blocks_of_windows() -> None:
    sched = scheduler()
    reservations, transfer_id = sched.reservations, TransferId("t")
    reservations.reserve(transfer_id, ledger.request([1] * 100))
    reservations.bind(transfer_id)
    num_used = sched.load().num_used_blocks
    reservations.quarantine(transfer_id)
    assert sched.load().num_quarantined_blocks == num_used == 7 + 2 * 3
    assert reservations.release_quarantine(transfer_id) == num_used
    ledger.assert_empty(sched)
