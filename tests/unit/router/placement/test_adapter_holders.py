"""Where adapters are resident, and that requests go there unless the queue costs more than a load."""

from random import Random

import pytest

from router.placement.costs import CostModel
from router.placement.placer import ADAPTER_REFUSED_S, AdapterHolders, Assignment, Placer
from router.types.worker_view import AdapterReport, WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tests.support.router.adapters import MEBIBYTE, adapter_of
from tests.support.router.worker_views import port, view_of, worker

RATE = 100.0 * MEBIBYTE
SQL = adapter_of("sql", num_bytes=20 * MEBIBYTE)


def _holding(name: str, *digests: str, **fields: int) -> WorkerSnapshot:
    load = WorkerLoad(num_free_blocks=1000, resident_adapters=frozenset(digests))
    return worker(name, load=load, **fields)


class _World:
    """A Placer over live workers, on a clock of its own."""

    def __init__(self, *workers: WorkerSnapshot) -> None:
        self.now_s = 0.0
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: self.now_s)
        for one in workers:
            self.registry.joined(one.info, port())
            self.report(one)
        model = CostModel(adapter_bytes_per_s=RATE, adapter_load_ms=0.0)
        self.placer = Placer(registry=self.registry, model=model, rng=Random(1), clock=lambda: self.now_s)

    def report(self, one: WorkerSnapshot) -> None:
        self.registry.load_changed(one.info.key, one.load)

    def assign(self, adapter: object = SQL, num_tokens: int = 40) -> Assignment:
        return self.placer.assign(num_tokens=num_tokens, names=(), adapter=adapter)  # type: ignore[arg-type]

    def decode(self, adapter: object = SQL, num_tokens: int = 40) -> str:
        """The worker that decodes a request that ends at once."""
        assignment = self.assign(adapter, num_tokens)
        self.placer.release(assignment)
        return assignment.decode.worker_id


def _workers_of(assignment: Assignment) -> tuple[WorkerKey, WorkerKey]:
    return assignment.decode, assignment.computing


def test_holders_small_adapters_take_time_as_well() -> None:
    holders = AdapterHolders(bytes_per_s=RATE, load_ms=20.0)
    small = adapter_of("small", num_bytes=1)
    assert holders.load_ms(small, view_of([_holding("d0"), _holding("d1", small.digest)]), 0.0) == pytest.approx(
        [20.0, 0.0]
    )


def test_holders_load_where_another_gives_way_counts_twice() -> None:
    holders = AdapterHolders(bytes_per_s=RATE, load_ms=0.0)
    totals = {"loads": 9, "evictions": 0, "failures": 0, "load_seconds": 1.0, "num_waiting": 0, "num_resident": 4}

    def holding(name: str, held_bytes: int) -> WorkerSnapshot:
        report = AdapterReport(**totals, held_bytes=held_bytes, capacity_bytes=100 * MEBIBYTE)
        return worker(name, load=WorkerLoad(num_free_blocks=1000, adapters=report))

    view = view_of([holding("d0", 80 * MEBIBYTE), holding("d1", 81 * MEBIBYTE)])
    assert holders.load_ms(SQL, view, 0.0) == pytest.approx([200.0, 400.0])


def test_holders_resident_or_expected_workers_load_nothing() -> None:
    holders = AdapterHolders(bytes_per_s=RATE, load_ms=0.0)
    workers = [_holding("d0", SQL.digest), _holding("d1"), _holding("p0", "other")]
    view = view_of(workers)
    assert holders.load_ms(SQL, view, 0.0) == pytest.approx([0.0, 200.0, 200.0])
    holders.sent(SQL, (workers[1].info.key,), 0.0)
    assert holders.load_ms(SQL, view, 1.0) == pytest.approx([0.0, 0.0, 200.0])
    assert holders.load_ms(adapter_of("sql", version=2), view, 1.0)[1] > 0.0
    # By now a report shows it, unless it has been dropped again.
    assert holders.load_ms(SQL, view, 10.0) == pytest.approx([0.0, 200.0, 200.0])


def test_holders_refused_pair_is_dear_until_its_time_is_over() -> None:
    holders, workers = (
        AdapterHolders(bytes_per_s=RATE, load_ms=0.0),
        [_holding("d0"), _holding("d1"), _holding("d2", SQL.digest)],
    )
    view, keys = view_of(workers), [one.info.key for one in workers]
    holders.sent(SQL, keys, 0.0)
    for key in (keys[0], keys[2]):
        holders.refused(SQL, key, 0.0)
    assert holders.refused_by(SQL, 1.0) == {keys[0], keys[2]}
    costs = holders.load_ms(SQL, view, 1.0)
    # One that reports it as loaded has it, whatever it said before.
    assert costs == pytest.approx([200.0 + 1e3 * (ADAPTER_REFUSED_S - 1.0), 0.0, 0.0])
    holders.sent(SQL, keys[:1], 1.0)
    assert holders.load_ms(SQL, view, 1.0) == costs, "what is sent there nevertheless is hardly loaded"
    other = adapter_of("sql", version=2)
    assert holders.load_ms(other, view, 1.0) == pytest.approx([200.0] * 3)
    assert holders.refused_by(other, 1.0) == set()
    late_s = ADAPTER_REFUSED_S + 5.0
    assert holders.load_ms(SQL, view, late_s)[0] == pytest.approx(200.0)
    assert holders.refused_by(SQL, late_s) == set()


def test_holders_with_many_refusals_forget_those_that_are_over() -> None:
    holders, key = AdapterHolders(bytes_per_s=RATE, load_ms=0.0), worker("d0").info.key
    for number in range(5000):
        holders.refused(adapter_of(f"a{number}"), key, float(number))
    assert len(holders._refused_until_s) <= 1025


@pytest.mark.parametrize("num_workers", [3, 12], ids=["one_by_one", "by_columns"])
def test_placement_avoids_worker_that_refused_the_adapter(num_workers: int) -> None:
    world = _World(*(_holding(f"d{i}") for i in range(num_workers)))
    first = world.assign()
    world.placer.release(first)
    world.placer.adapters.refused(SQL, first.decode, world.now_s)
    for _ in range(8):
        assert world.decode() != first.decode.worker_id
        world.now_s += 1.0
    assert first.decode.worker_id in {world.decode(None) for _ in range(200)}, "others still go there"
    for one in world.registry.snapshots():
        world.placer.adapters.refused(SQL, one.info.key, world.now_s)
    assert world.decode(), "refused everywhere, it is still tried"


def test_holders_with_many_expectations_forget_those_that_are_over() -> None:
    holders, key = AdapterHolders(bytes_per_s=RATE, load_ms=0.0), worker("d0").info.key
    for number in range(5000):
        holders.sent(adapter_of(f"a{number}"), (key,), float(number))
    assert len(holders._expected_until_s) <= 1025


def test_placement_request_goes_where_its_adapter_is_resident() -> None:
    world = _World(*(_holding(f"d{i}", *([SQL.digest] if i == 2 else [])) for i in range(4)))
    assert {world.decode() for _ in range(4)} == {"d2"}
    assert len({world.decode(None) for _ in range(30)}) > 1, "others are spread"


def test_placement_resident_worker_with_a_dear_queue_is_passed_over() -> None:
    """20 MiB take 200 ms to load; a token takes 1 ms to compute."""

    def busy(backlog: int) -> WorkerSnapshot:
        load = WorkerLoad(
            num_free_blocks=1000,
            backlog_tokens=backlog,
            prefill_tokens_per_s=1000.0,
            resident_adapters=frozenset([SQL.digest]),
        )
        return worker("d0", load=load)

    idle = worker("d1", load=WorkerLoad(num_free_blocks=1000, prefill_tokens_per_s=1000.0))
    assert _World(busy(150), idle).decode() == "d0"
    assert _World(busy(300), idle).decode() == "d1"


def test_placement_first_requests_for_an_adapter_make_one_worker_load_it() -> None:
    world = _World(*(_holding(f"d{i}") for i in range(4)))
    first = world.decode()
    assert {world.decode() for _ in range(3)} == {first}
    # Reported by now, or never: elsewhere it costs no more any longer.
    world.now_s += 60.0
    world.report(_holding("d3", SQL.digest))
    assert world.decode() == "d3"


def test_placement_prefill_worker_with_the_adapter_is_chosen_also_after_a_failure() -> None:
    prefills = [_holding(f"p{i}", *([SQL.digest] if i == 1 else [])) for i in range(3)]
    world = _World(worker("d0"), *prefills)
    assignment = world.assign(num_tokens=900)
    assert assignment.computing.worker_id == "p1"
    again = world.placer.reassign_prefill(assignment, frozenset([assignment.computing]))
    assert again is not None
    second = world.assign(num_tokens=900)
    world.placer.release(second)
    world.now_s += 0.1
    world.registry.penalise(prefills[1].info.key, 60.0)
    assert world.assign(num_tokens=900).computing == again.info.key, "it loads it for the one before"


@pytest.mark.parametrize("num_workers", [2, 12], ids=["one_by_one", "by_columns"])
def test_placement_older_workers_get_no_request_with_an_adapter(num_workers: int) -> None:
    old = [worker(f"{role}{i}", version=ADAPTERS_SINCE - 1) for role in "dp" for i in range(num_workers)]
    world = _World(*old, _holding("d-new", SQL.digest), _holding("p-new", SQL.digest))
    assignment = world.assign(num_tokens=900)
    assert (assignment.decode.worker_id, assignment.computing.worker_id) == ("d-new", "p-new")
    for _ in range(10):
        assert {one.worker_id for one in _workers_of(world.assign(num_tokens=900))} <= {"d-new", "p-new"}
    rerouted = world.placer.reassign_prefill(assignment, frozenset([assignment.computing]))
    assert rerouted is None, "the decode worker computes it rather than an older prefill worker"
    assert len({world.decode(None) for _ in range(60)}) > 1


def test_placement_costs_of_the_adapter_are_explained() -> None:
    world = _World(_holding("d0", SQL.digest), _holding("d1"))
    placement = world.assign().placement
    assert [(one.key.worker_id, one.adapter_ms) for one in placement.decode_candidates] == [
        ("d0", 0.0),
        ("d1", pytest.approx(200.0)),
    ]
