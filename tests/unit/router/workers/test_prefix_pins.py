"""Where a pin lives, who renews it, and what is left of it when its worker or its time is gone."""

import pytest

from router.types.requests import PinRequest
from router.types.worker_view import WorkerKey
from router.workers.prefix_pins import PinRegistry, PinSite
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult

NAMES = [BlockHash(bytes([number])) for number in range(8)]
P0, P1 = (WorkerKey(WorkerId(name), Incarnation(1)) for name in ("p0", "p1"))


class Port:
    def __init__(self) -> None:
        self.pins: list[PinOrder] = []
        self.unpinned: list[PinKey] = []

    def pin(self, order: PinOrder) -> None:
        self.pins.append(order)

    def unpin(self, key: PinKey) -> None:
        self.unpinned.append(key)


class World:
    def __init__(self, *, max_pins: int = 100, block_size: int = 16) -> None:
        self.now_s = 1000.0
        self.ports = {P0: Port(), P1: Port()}
        self.leaving: set[WorkerKey] = set()
        self.gone: set[WorkerKey] = set()
        self.block_size = block_size
        self.pins = PinRegistry(find=self.find, clock=lambda: self.now_s, max_pins=max_pins)

    def find(self, key: WorkerKey) -> PinSite | None:
        if key in self.gone:
            return None
        port = self.ports[key]
        return PinSite(port=port, block_size=self.block_size, is_leaving=key in self.leaving)  # type: ignore[arg-type]

    def use(self, worker: WorkerKey, name: str = "x", *, num_tokens: int = 50, ttl_s: float = 300.0) -> None:
        self.pins.used("t", [PinRequest(name=name, num_tokens=num_tokens, ttl_s=ttl_s)], worker, NAMES)

    def told(self, worker: WorkerKey, outcome: PinOutcome) -> None:
        self.pins.on_outcome(worker, PinResult(key=PinKey("t", "x"), outcome=outcome, num_tokens=48))


def test_a_pin_is_of_the_whole_blocks_of_whoever_computed_the_prompt() -> None:
    world = World()
    world.use(P0)
    assert world.ports[P0].pins == [PinOrder(key=PinKey("t", "x"), last_block=NAMES[2], ttl_s=300.0)]
    larger = World(block_size=32)
    larger.use(P0)
    assert larger.ports[P0].pins[0].last_block == NAMES[1]


def test_what_fills_no_block_is_not_pinned() -> None:
    world = World()
    world.use(P0, num_tokens=15)
    assert world.ports[P0].pins == []
    assert len(world.pins) == 0


@pytest.mark.parametrize("said", [None, PinOutcome.HELD])
def test_a_use_elsewhere_renews_it_where_it_is(said: PinOutcome | None) -> None:
    world = World()
    world.use(P0)
    if said is not None:
        world.told(P0, said)
    world.now_s += 200.0
    world.use(P1)
    assert [len(world.ports[key].pins) for key in (P0, P1)] == [2, 0]
    assert [left for _, _, left in world.pins.of_tenant("t")] == [300.0]


@pytest.mark.parametrize("said", [PinOutcome.GAVE_WAY, PinOutcome.NOT_HERE, PinOutcome.NO_ROOM])
def test_what_a_worker_does_not_hold_is_made_anew_at_the_next_use(said: PinOutcome) -> None:
    world = World()
    world.use(P0)
    world.told(P0, said)
    record = world.pins.find("t", "x")
    assert record is not None
    assert record.outcome is said
    world.use(P1)
    assert [len(world.ports[key].pins) for key in (P0, P1)] == [1, 1]


def test_a_pin_moves_when_its_worker_leaves_and_is_forgotten_when_it_is_gone() -> None:
    world = World()
    world.use(P0)
    world.leaving.add(P0)
    world.use(P1)
    assert len(world.ports[P1].pins) == 1
    world.pins.left(P1)
    assert world.pins.find("t", "x") is None
    world.gone.add(P1)
    world.use(P1)
    assert len(world.pins) == 0


def test_nobody_else_says_what_became_of_a_pin() -> None:
    world = World()
    world.use(P0)
    world.told(P1, PinOutcome.GAVE_WAY)
    record = world.pins.find("t", "x")
    assert record is not None
    assert record.outcome is None


def test_time_ends_a_pin_here_as_there() -> None:
    world = World()
    world.use(P0, ttl_s=10.0)
    world.now_s += 10.0
    assert world.pins.find("t", "x") is None
    assert list(world.pins.of_tenant("t")) == []
    world.use(P1, ttl_s=10.0)
    assert len(world.ports[P1].pins) == 1


def test_a_wish_that_ends_at_a_time_is_not_prolonged_by_use() -> None:
    world = World()
    wish = PinRequest(name="n", num_tokens=16, find_end_s=lambda: 1100.0)
    world.pins.used("t", [wish], P0, NAMES)
    world.now_s += 60.0
    world.pins.used("t", [wish], P0, NAMES)
    assert [order.ttl_s for order in world.ports[P0].pins] == [100.0, 40.0]
    world.now_s += 40.0
    world.pins.used("t", [wish], P0, NAMES)
    assert len(world.ports[P0].pins) == 2


def test_what_is_not_wanted_any_more_once_it_is_computed_is_not_made() -> None:
    world = World()
    world.pins.used("t", [PinRequest(name="n", num_tokens=16, find_end_s=lambda: None)], P0, NAMES)
    assert (world.ports[P0].pins, len(world.pins)) == ([], 0)


def test_a_pin_is_taken_back_where_it_is() -> None:
    world = World()
    world.use(P0)
    world.pins.release("t", "x")
    world.pins.release("t", "x")
    assert world.ports[P0].unpinned == [PinKey("t", "x")]
    assert len(world.pins) == 0


def test_tenants_do_not_see_each_others() -> None:
    world = World()
    world.use(P0)
    assert list(world.pins.of_tenant("u")) == []
    assert world.pins.find("u", "x") is None


def test_the_books_are_bounded_by_forgetting_what_is_over_and_then_what_was_used_longest_ago() -> None:
    world = World(max_pins=3)
    world.use(P0, "short", ttl_s=1.0)
    for name in ("a", "b"):
        world.use(P0, name)
    world.now_s += 2.0
    world.use(P0, "c")
    assert [name for name, _, _ in world.pins.of_tenant("t")] == ["c", "b", "a"]
    world.use(P0, "a")
    world.use(P0, "d")
    assert [name for name, _, _ in world.pins.of_tenant("t")] == ["d", "a", "c"]


def test_a_wish_without_a_name_is_known_by_its_prefix_whatever_the_workers_block_size() -> None:
    for block_size in (16, 32):
        world = World(block_size=block_size)
        world.use(P0, "", num_tokens=50)
        world.use(P0, "", num_tokens=33)
        assert [name for name, _, _ in world.pins.of_tenant("t")] == ["300s:01", "300s:02"]


def test_whoever_asks_for_very_many_pins_forgets_its_own() -> None:
    world = World(max_pins=8)
    world.use(P0, "mine")
    for number in range(50):
        wish = PinRequest(name=f"theirs {number}", num_tokens=16, ttl_s=300.0)
        world.pins.used("flood", [wish], P0, NAMES)
    assert len(world.pins) == 8
    assert world.pins.find("t", "mine") is not None
    assert [name for name, *_ in world.pins.of_tenant("flood")] == [f"theirs {number}" for number in range(49, 42, -1)]
