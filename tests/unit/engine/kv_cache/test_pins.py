"""Pinned prefixes: protection from eviction, expiry, bounds, and which pin gives way."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from engine.kv_cache.pins import PinBounds
from engine.kv_cache.pool import PoolExhausted
from engine.scheduler.scheduler import Scheduler
from engine.types.request import SampledToken
from engine.types.windows import WindowSpec
from tandem.errors import InvalidRequest
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, BlockId, TransferId
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult, PinTotals
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import BLOCK, LedgerRunner, assert_empty, continuation, run

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class World:
    """A scheduler of 20 blocks, of which pins may hold 8, one tenant's 5."""

    def __init__(
        self,
        num_blocks: int = 20,
        *,
        max_blocks: int = 8,
        max_tenant_blocks: int = 5,
        windows: WindowSpec | None = None,
    ) -> None:
        self.hasher = BlockHasher(ledger.SECRET)
        bounds = PinBounds(max_blocks=max_blocks, max_tenant_blocks=max_tenant_blocks)
        config = ledger.config(num_blocks=num_blocks, max_model_len=320, windows=windows)
        self.sched = Scheduler(config, self.hasher, pins=bounds)
        self.runner = LedgerRunner(window=None if windows is None else windows.window)

    def compute(self, prompt: Sequence[int], params: SamplingParams = ONE) -> int:
        """Run a prompt; returns how many of its tokens were cached."""
        request = ledger.request(prompt, params=params)
        self.sched.add(request)
        outputs = run(self.sched, self.runner)
        assert outputs[request.request_id] == continuation(prompt, params, limit=320)
        return request.num_cached_tokens

    def flood(self) -> None:
        """Run other prompts, of several times the pool's size in all."""
        for first in range(10_000, 10_800, 100):
            self.compute(range(first, first + 6 * BLOCK))

    def name(self, prompt: Sequence[int], num_blocks: int) -> BlockHash:
        names: list[BlockHash] = []
        self.hasher.extend(ledger.ROOT, names, prompt)
        return names[num_blocks - 1]

    def pin(
        self, prompt: Sequence[int], num_blocks: int, *, tenant: str = "a", ttl_s: float = 300.0, now: float = 0.0
    ) -> PinOutcome:
        return self.order(prompt, num_blocks, tenant=tenant, ttl_s=ttl_s, now=now).outcome

    def order(
        self,
        prompt: Sequence[int],
        num_blocks: int,
        *,
        tenant: str = "a",
        name: str = "",
        ttl_s: float = 300.0,
        now: float = 0.0,
    ) -> PinResult:
        last = self.name(prompt, num_blocks)
        order = PinOrder(key=PinKey(tenant, name or last.hex()), last_block=last, ttl_s=ttl_s)
        return self.sched.pins.pin(order, now)


def first(number: int, num_blocks: int = 3) -> range:
    """A prompt of so many whole blocks and one token."""
    return range(1000 * number, 1000 * number + num_blocks * BLOCK + 1)


def test_pin_prefix_survives_eviction() -> None:
    world = World()
    for number in (1, 2):
        world.compute(first(number))
    assert world.pin(first(1), 3) is PinOutcome.HELD
    world.flood()
    assert world.compute(first(1)) == 48
    assert world.compute(first(2)) == 0
    world.sched.check_invariants()


def test_pin_expires_unless_renewed() -> None:
    world = World()
    world.compute(first(1))
    assert world.pin(first(1), 3, ttl_s=10.0, now=0.0) is PinOutcome.HELD
    assert world.pin(first(1), 3, ttl_s=10.0, now=8.0) is PinOutcome.HELD
    world.sched.schedule(17.9)
    assert world.sched.load().pins.num_blocks == 3
    world.sched.schedule(18.0)
    assert world.sched.load().pins == PinTotals(max_blocks=8, made=1, renewed=1, expired=1)
    assert_empty(world.sched)
    world.flood()
    assert world.compute(first(1)) == 0


def test_pin_expired_on_idle_engine_frees_its_room() -> None:
    world = World()
    for number in (1, 2):
        world.compute(first(number, 5))
    assert world.pin(first(1, 5), 5, ttl_s=10.0, now=0.0) is PinOutcome.HELD
    assert world.pin(first(2, 5), 5, tenant="b", now=9.0) is PinOutcome.NO_ROOM
    assert world.pin(first(2, 5), 5, tenant="b", now=10.0) is PinOutcome.HELD
    assert world.sched.load().pins == PinTotals(num_pins=1, num_blocks=5, max_blocks=8, made=2, refused=1, expired=1)
    world.sched.check_invariants()


def test_pin_can_be_shortened_and_removed() -> None:
    world = World()
    world.compute(first(1))
    world.pin(first(1), 3, ttl_s=100.0)
    world.pin(first(1), 3, ttl_s=1.0)
    world.sched.schedule(1.0)
    assert len(world.sched.pins) == 0
    world.pin(first(1), 3)
    key = PinKey("a", world.name(first(1), 3).hex())
    assert world.sched.pins.unpin(key)
    assert not world.sched.pins.unpin(key)
    assert_empty(world.sched)


def test_pin_absent_prefix_is_refused() -> None:
    world = World()
    assert world.pin(first(1), 3) is PinOutcome.NOT_HERE
    assert world.sched.load().pins.refused == 1


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_pin_without_end_is_refused(ttl_s: float) -> None:
    world = World()
    world.compute(first(1))
    with pytest.raises(InvalidRequest):
        world.pin(first(1), 3, ttl_s=ttl_s)


def test_pin_beyond_tenant_share_replaces_own_least_recently_used() -> None:
    world = World()
    for number in (1, 2, 3):
        world.compute(first(number, 2))
    assert world.pin(first(1, 2), 2) is PinOutcome.HELD
    assert world.pin(first(2, 2), 2) is PinOutcome.HELD
    assert world.pin(first(1, 2), 2) is PinOutcome.HELD  # used again
    assert world.pin(first(3, 2), 2) is PinOutcome.HELD
    lost = world.sched.drain().lost_pins
    assert lost == (PinKey("a", world.name(first(2, 2), 2).hex()),)
    world.flood()
    assert [world.compute(first(number, 2)) for number in (1, 2, 3)] == [32, 0, 32]


def test_pin_never_replaces_pins_of_another_tenant() -> None:
    world = World()
    for number in (1, 2):
        world.compute(first(number, 5))
    assert world.pin(first(1, 5), 5, tenant="a") is PinOutcome.HELD
    assert world.pin(first(2, 5), 5, tenant="b") is PinOutcome.NO_ROOM
    assert world.pin(first(2, 5), 3, tenant="b") is PinOutcome.HELD
    assert world.sched.load().pins.num_blocks == 8
    assert world.sched.drain().lost_pins == ()


def test_pin_larger_than_tenant_share_disturbs_no_other() -> None:
    world = World()
    world.compute(first(1, 2))
    world.compute(first(2, 6))
    world.pin(first(1, 2), 2)
    assert world.pin(first(2, 6), 6) is PinOutcome.NO_ROOM
    assert world.sched.load().pins.num_pins == 1


def test_pins_on_one_chain_share_their_blocks() -> None:
    world = World()
    world.compute(first(1, 5))
    for num_blocks in (5, 3, 4):
        assert world.pin(first(1, 5), num_blocks) is PinOutcome.HELD
    assert world.sched.load().pins.num_blocks == 5
    assert world.sched.pins.unpin(PinKey("a", world.name(first(1, 5), 5).hex()))
    assert world.sched.load().pins.num_blocks == 4
    world.sched.check_invariants()


def test_pins_leave_promised_blocks_alone() -> None:
    world = World()
    world.compute(first(1))
    wanted = ledger.request(range(5000, 5000 + 19 * BLOCK))
    world.sched.reservations.reserve(TransferId("t"), wanted)
    assert world.pin(first(1), 3) is PinOutcome.NO_ROOM
    assert len(world.sched.reservations.bind(TransferId("t"))) == 19


def test_pins_request_releases_only_as_many_as_needed() -> None:
    world = World()
    for number, tenant in ((1, "a"), (2, "b")):
        world.compute(first(number, 4))
        assert world.pin(first(number, 4), 4, tenant=tenant) is PinOutcome.HELD
    world.compute(range(5000, 5000 + 12 * BLOCK - 1))
    assert world.sched.load().pins.num_pins == 2
    world.compute(range(6000, 6000 + 13 * BLOCK - 1))
    assert world.sched.drain().lost_pins == ()  # reported while it ran
    totals = world.sched.load().pins
    assert (totals.num_pins, totals.gave_way) == (1, 1)
    assert world.compute(first(2, 4)) == 64


def test_pin_gives_way_to_growing_sequence() -> None:
    world = World()
    world.compute(first(1, 5))
    world.pin(first(1, 5), 5)
    world.compute(range(5000, 5000 + 10 * BLOCK), SamplingParams(max_tokens=9 * BLOCK, ignore_eos=True))
    assert world.sched.load().pins.gave_way == 1


def test_pin_of_own_prefix_is_kept_for_large_request() -> None:
    world = World()
    world.compute(first(1, 5))
    world.pin(first(1, 5), 5)
    assert world.compute(range(1000, 1000 + 20 * BLOCK - 1)) == 80
    assert world.sched.load().pins.num_pins == 1


def test_pin_gives_way_to_large_reservation_only() -> None:
    world = World()
    world.compute(first(1, 5))
    world.pin(first(1, 5), 5)
    reservations = world.sched.reservations
    reservations.reserve(TransferId("small"), ledger.request(range(5000, 5000 + 10 * BLOCK)))
    with pytest.raises(PoolExhausted):
        reservations.reserve(TransferId("second"), ledger.request(range(6000, 6000 + 10 * BLOCK)))
    assert world.sched.load().pins.num_pins == 1
    reservations.cancel(TransferId("small"))
    grant = reservations.reserve(TransferId("large"), ledger.request(range(7000, 7000 + 18 * BLOCK)))
    assert grant.num_blocks == 18
    assert world.sched.has_output
    assert len(world.sched.drain().lost_pins) == 1


def test_pin_of_invalid_blocks_is_dropped() -> None:
    world = World()
    world.compute(first(1, 2))
    world.pin(first(1, 2), 2)
    longer = ledger.request(range(1000, 1000 + 60))
    world.sched.add(longer)
    while (batch := world.sched.schedule(0.0)) is not None:
        outputs: list[SampledToken | None] = [None for item in batch.items if item.samples]
        world.sched.commit(batch, outputs)
    assert len(world.sched.pins) == 0
    assert world.compute(first(1, 2)) == 0


def test_pins_without_limits_refuse_all() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    sched.add(ledger.request(first(1), params=ONE))
    run(sched, runner)
    names: list[BlockHash] = []
    BlockHasher(ledger.SECRET).extend(ledger.ROOT, names, first(1))
    order = PinOrder(key=PinKey("a", "x"), last_block=names[0], ttl_s=1.0)
    assert sched.pins.pin(order, 0.0).outcome is PinOutcome.NO_ROOM
    assert sched.pins.pin(replace(order, last_block=BlockHash(b"?")), 0.0).outcome is PinOutcome.NOT_HERE


def test_pin_many_giving_way_weighs_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighing all anew for each of thousands would stall every stream of the worker."""
    looks = 0

    class Chain(list[BlockId]):
        def __iter__(self) -> Iterator[BlockId]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    def looks_of(num_small: int) -> int:
        nonlocal looks
        world = World()
        for number in range(num_small):
            world.compute(first(number, 1))
            assert world.pin(first(number, 1), 1) is PinOutcome.HELD
        world.compute(first(9, 4))
        index, chain = world.sched.pins._blocks.index, world.name(first(9, 4), 4)
        blocks = index.chain_to(chain)
        assert blocks is not None
        looks = 0
        with monkeypatch.context() as patched:
            patched.setattr(type(index), "chain_to", lambda _self, _last: Chain(blocks))
            assert world.pin(first(9, 4), 4) is PinOutcome.HELD
        assert world.sched.load().pins.num_pins == 2
        assert world.sched.load().pins.gave_way == num_small - 1
        return looks

    assert looks_of(4) == looks_of(2)


WINDOWS = WindowSpec(window=24, num_groups=2, block_size=BLOCK, ahead_tokens=40)
"""A prefix of some blocks needs two sets of two blocks."""


def windowed(num_blocks: int, max_blocks: int) -> World:
    return World(num_blocks, max_blocks=max_blocks, max_tenant_blocks=max_blocks, windows=WINDOWS)


def test_pins_that_share_a_window_take_its_blocks_once() -> None:
    world = windowed(60, 15)
    world.compute(first(1))
    for number in range(14):
        assert world.order(first(1), 3, name=str(number)).num_tokens == 48
    assert world.sched.load().pins.num_blocks == 3 + 4
    assert world.sched.blocks.num_available == 60 - 7
    world.sched.check_invariants()
    world.compute(range(5000, 5060))
    for number in range(14):
        assert world.compute(first(1)) == 48
        assert world.sched.pins.unpin(PinKey("a", str(number)))
    assert_empty(world.sched)


@pytest.mark.parametrize("num_spare", [0, 1, 2, 3, 4])
def test_pin_of_own_prefix_gives_its_window_to_large_request(num_spare: int) -> None:
    """The request pays for blocks of its own where its window is the pin's."""
    world = windowed(WINDOWS.num_blocks(156) + num_spare, 12)
    world.compute(first(1))
    assert world.pin(first(1), 3) is PinOutcome.HELD
    world.compute(range(1000, 1156))
    assert world.sched.load().pins.num_pins == (num_spare == 4)
    world.sched.check_invariants()


def test_pin_whose_window_is_in_use_is_refused_on_busy_worker() -> None:
    """Its order comes while the request still holds the window: each block of it is paid for once more."""
    world = windowed(30, 15)
    world.sched.add(ledger.request(first(1), request_id="held", prefill_only=True))
    run(world.sched, world.runner)
    blocks = world.sched.blocks
    num_promised = blocks.num_available - 3
    blocks.promise(num_promised)
    assert world.pin(first(1), 3) is PinOutcome.NO_ROOM
    assert world.sched.load().pins == PinTotals(max_blocks=15, refused=1)
    blocks.unpromise(1)
    assert world.pin(first(1), 3) is PinOutcome.HELD
    assert blocks.num_available == 0
    blocks.unpromise(num_promised - 1)
    world.sched.check_invariants()


def test_pin_inside_prompt_takes_the_window_that_the_next_prompt_leaves() -> None:
    """Nothing is known of its end when the first prompt goes past it; from then on whoever computes it keeps it."""
    world = windowed(60, 15)
    prefix = [*range(6 * BLOCK)]
    common = [*prefix, *[1] * BLOCK]  # where the prompts part: not the pin's end
    world.compute([*common, *[2] * 60])
    assert world.order(prefix, 6) == PinResult(key=PinKey("a", world.name(prefix, 6).hex()), outcome=PinOutcome.HELD)
    assert world.compute([*common, *[3] * 60]) == 0
    result = world.order(prefix, 6)
    assert (result.outcome, result.num_tokens) == (PinOutcome.HELD, 96)
    assert world.sched.load().pins == PinTotals(num_pins=1, num_blocks=6 + 4, max_blocks=15, made=1, renewed=1)
    world.flood()
    assert world.compute([*prefix, *[4] * 60]) == 96
    assert world.sched.pins.unpin(result.key)
    assert not world.sched.blocks.marked_ends
    assert_empty(world.sched)


def test_pin_renewed_without_room_for_its_window_stays_as_it_is() -> None:
    world = windowed(60, 9)
    prefix = [*range(6 * BLOCK)]
    for own in (2, 3):
        world.compute([*prefix, *[own] * 60])
        result = world.order(prefix, 6)
        assert (result.outcome, result.num_tokens) == (PinOutcome.HELD, 0)
    assert world.sched.load().pins == PinTotals(num_pins=1, num_blocks=6, max_blocks=9, made=1, renewed=1)
