"""The worker of a pin, its renewal, and its end with its worker or its lifetime."""

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

    def report_outcome(self, worker: WorkerKey, outcome: PinOutcome) -> None:
        self.pins.on_outcome(worker, PinResult(key=PinKey("t", "x"), outcome=outcome, num_tokens=48))


def test_pin_covers_whole_blocks_of_computing_worker() -> None:
    world = World()
    world.use(P0)
    assert world.ports[P0].pins == [PinOrder(key=PinKey("t", "x"), last_block=NAMES[2], ttl_s=300.0)]
    larger = World(block_size=32)
    larger.use(P0)
    assert larger.ports[P0].pins[0].last_block == NAMES[1]


def test_pin_shorter_than_block_is_not_created() -> None:
    world = World()
    world.use(P0, num_tokens=15)
    assert world.ports[P0].pins == []
    assert len(world.pins) == 0


@pytest.mark.parametrize("outcome", [None, PinOutcome.HELD])
def test_pin_used_elsewhere_is_renewed_in_place(outcome: PinOutcome | None) -> None:
    world = World()
    world.use(P0)
    if outcome is not None:
        world.report_outcome(P0, outcome)
    world.now_s += 200.0
    world.use(P1)
    assert [len(world.ports[key].pins) for key in (P0, P1)] == [2, 0]
    assert [left for _, _, left in world.pins.of_tenant("t")] == [300.0]


@pytest.mark.parametrize("outcome", [PinOutcome.GAVE_WAY, PinOutcome.NOT_HERE, PinOutcome.NO_ROOM])
def test_pin_refused_by_worker_is_recreated_on_use(outcome: PinOutcome) -> None:
    world = World()
    world.use(P0)
    world.report_outcome(P0, outcome)
    record = world.pins.find("t", "x")
    assert record is not None
    assert record.outcome is outcome
    world.use(P1)
    assert [len(world.ports[key].pins) for key in (P0, P1)] == [1, 1]


def test_pin_of_leaving_worker_moves_on_use() -> None:
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


def test_pin_report_of_other_worker_is_ignored() -> None:
    world = World()
    world.use(P0)
    world.report_outcome(P1, PinOutcome.GAVE_WAY)
    record = world.pins.find("t", "x")
    assert record is not None
    assert record.outcome is None


def test_pin_expires_by_clock() -> None:
    world = World()
    world.use(P0, ttl_s=10.0)
    world.now_s += 10.0
    assert world.pins.find("t", "x") is None
    assert list(world.pins.of_tenant("t")) == []
    world.use(P1, ttl_s=10.0)
    assert len(world.ports[P1].pins) == 1


def test_pin_with_fixed_end_is_not_prolonged_by_use() -> None:
    world = World()
    wish = PinRequest(name="n", num_tokens=16, find_end_s=lambda: 1100.0)
    world.pins.used("t", [wish], P0, NAMES)
    world.now_s += 60.0
    world.pins.used("t", [wish], P0, NAMES)
    assert [order.ttl_s for order in world.ports[P0].pins] == [100.0, 40.0]
    world.now_s += 40.0
    world.pins.used("t", [wish], P0, NAMES)
    assert len(world.ports[P0].pins) == 2


def test_pin_withdrawn_before_computed_is_not_made() -> None:
    world = World()
    world.pins.used("t", [PinRequest(name="n", num_tokens=16, find_end_s=lambda: None)], P0, NAMES)
    assert (world.ports[P0].pins, len(world.pins)) == ([], 0)


def test_pin_release_unpins_at_its_worker() -> None:
    world = World()
    world.use(P0)
    world.pins.release("t", "x")
    world.pins.release("t", "x")
    assert world.ports[P0].unpinned == [PinKey("t", "x")]
    assert len(world.pins) == 0


def test_pins_are_private_to_tenants() -> None:
    world = World()
    world.use(P0)
    assert list(world.pins.of_tenant("u")) == []
    assert world.pins.find("u", "x") is None


def test_pin_registry_full_evicts_expired_then_lru() -> None:
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


def test_pin_without_name_is_named_by_prefix() -> None:
    for block_size in (16, 32):
        world = World(block_size=block_size)
        world.use(P0, "", num_tokens=50)
        world.use(P0, "", num_tokens=33)
        assert [name for name, _, _ in world.pins.of_tenant("t")] == ["300s:01", "300s:02"]


def test_pin_registry_full_evicts_from_largest_tenant() -> None:
    world = World(max_pins=8)
    world.use(P0, "mine")
    for number in range(50):
        wish = PinRequest(name=f"theirs {number}", num_tokens=16, ttl_s=300.0)
        world.pins.used("flood", [wish], P0, NAMES)
    assert len(world.pins) == 8
    assert world.pins.find("t", "mine") is not None
    assert [name for name, *_ in world.pins.of_tenant("flood")] == [f"theirs {number}" for number in range(49, 42, -1)]
