"""The joint choice of a pair: links between two workers count."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.placement import partners, pricing
from router.placement.costs import CostModel
from router.placement.pool_costs import Column
from router.placement.worker_selection import NoDecodeWorker, Placement, place, place_prefill
from router.types.worker_view import WorkerLoad, WorkerSnapshot
from router.workers.pair_links import PairLinks, PairTable
from tests.support.router.reference_costs import PlacementRequest, held, pair_cost
from tests.support.router.worker_views import demand_of, view_of, worker

EXACT = CostModel(tie_ms=0.0, tie_share=0.0)
LOAD = WorkerLoad(num_free_blocks=1000, kv_bytes_per_s=5e5)


def at(host: str, one: WorkerSnapshot) -> WorkerSnapshot:
    return replace(one, info=replace(one.info, handoff_address=f"{host}:1", transports=frozenset({"shm", "tcp"})))


def placed(
    workers: list[WorkerSnapshot], request: PlacementRequest, table: PairTable | None, model: CostModel = EXACT
) -> tuple[Placement, PairLinks | None]:
    view = view_of(workers)
    links = None if table is None else PairLinks(table, view.decode.members, view.prefill.members)
    if links is not None and not links.refreshed(0.0):
        links = None
    wanted = demand_of(
        view,
        request.num_tokens,
        *(w for w in workers if w.info.key in request.excluded),
        matched=request.matched,
        replicate_tokens=request.replicate_tokens,
        links=links,
    )
    return place(wanted, view, model, Random(0)), links


def pair_of(placement: Placement) -> tuple[str, str | None]:
    prefill = placement.prefill
    return placement.decode.info.key.worker_id, None if prefill is None else prefill.info.key.worker_id


def test_pair_placement_fast_pair_beats_best_single_workers() -> None:
    table = PairTable()
    workers = [at("a", worker("d0", load=LOAD, active=9)), at("b", worker("d1", load=LOAD, active=10))]
    workers += [at("c", worker("p0", backlog=0)), at("b", worker("p1", backlog=20))]
    request = PlacementRequest(num_tokens=1000, matched={})
    assert pair_of(placed(workers, request, None)[0]) == ("d0", "p0")
    # Exposed transfers between hosts take 20 ms per 100 tokens, within one host a tenth of it.
    for sender, receiver, seconds in ((2, 0, 0.02), (3, 0, 0.02), (2, 1, 0.02), (3, 1, 0.002)):
        for _ in range(20):
            table.observe(workers[sender].info, workers[receiver].info, num_tokens=100, exposed_s=seconds, now_s=0.0)
    placement, _ = placed(workers, request, table)
    assert pair_of(placement) == ("d1", "p1")
    first = placement.decode_candidates[0]
    assert first.pair_ms < -50.0
    assert first.total_ms == pytest.approx(placement.predicted_ms)


def test_pair_placement_avoids_long_prefill_queue() -> None:
    workers = [at("a", worker("d0", load=LOAD, active=9)), at("b", worker("d1", load=LOAD, active=9))]
    workers += [at("c", worker("p0")), at("b", worker("p1", backlog=9_000))]
    assert pair_of(placed(workers, PlacementRequest(num_tokens=1000, matched={}), PairTable())[0])[1] == "p0"


def test_rerouted_prefill_considers_the_link() -> None:
    workers = [at("a", worker("d0", load=LOAD, active=9))]
    workers += [at("b", worker("p0")), at("a", worker("p1", backlog=20)), at("c", worker("p2"))]
    table = PairTable()
    for sender, seconds in ((1, 0.02), (2, 0.002), (3, 0.02)):
        for _ in range(20):
            table.observe(workers[sender].info, workers[0].info, num_tokens=100, exposed_s=seconds, now_s=0.0)
    view = view_of(workers)
    links = PairLinks(table, view.decode.members, view.prefill.members)
    assert links.refreshed(0.0)
    wanted = demand_of(view, 1000, matched={}, links=links)
    found = place_prefill(wanted, workers[0], view, EXACT, Random(0))
    assert found is not None
    assert found[0].info.key.worker_id == "p1"


@pytest.mark.parametrize("few", [0, pricing.MAX_PRICED_SINGLY], ids=["by_columns", "one_by_one"])
def test_pair_placement_finds_cheapest_of_all_pairs(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "MAX_PRICED_SINGLY", few)
    rng, num_remote, num_moved = Random(5), 0, 0
    for _ in range(300):
        workers, request, table = _cluster_at_random(rng)
        workers, request = _hindered(rng, workers, request)
        try:
            placement, links = placed(workers, request, table)
        except NoDecodeWorker:
            continue
        if links is None:
            continue
        costs = {pair: cost for pair, cost in _costs(workers, request, links)}
        assert placement.predicted_ms == pytest.approx(min(costs.values()), rel=1e-9)
        assert placement.predicted_ms == pytest.approx(costs[pair_of(placement)], rel=1e-9)
        for cost in placement.decode_candidates:
            least = min(value for (name, _), value in costs.items() if name == cost.key.worker_id)
            assert cost.total_ms == pytest.approx(least, rel=1e-9)
        num_remote += placement.prefill is not None
        num_moved += pair_of(placement) != pair_of(placed(workers, request, None)[0])
    assert num_remote > 40
    assert num_moved > 10


def test_linked_placement_decides_alike_one_by_one_and_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies of prefixes, penalties, and workers that are closed to the choice."""
    rng, cases, found, terms = Random(7), [], [], set()
    for _ in range(300):
        workers, request, table = _cluster_at_random(rng)
        cases.append((*_hindered(rng, workers, request), table))
    for few in (0, pricing.MAX_PRICED_SINGLY):
        monkeypatch.setattr(pricing, "MAX_PRICED_SINGLY", few)
        decisions: list[object] = []
        for workers, request, table in cases:
            try:
                made, _ = placed(workers, request, table, CostModel())
            except NoDecodeWorker as error:
                decisions.append(str(error))
                continue
            shown = (*made.decode_candidates, *made.prefill_candidates)
            terms |= {name for cost in shown for name in ("pair_ms", "copy_ms", "penalty_ms") if getattr(cost, name)}
            decisions.append((made.decode, made.prefill, made.reason, made.affinity, made.predicted_ms, shown))
        found.append(decisions)
    assert found[0] == found[1]
    assert terms == {"pair_ms", "copy_ms", "penalty_ms"}


def test_pair_placement_of_many_is_within_spread_of_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only those that could be cheapest are priced with every partner; what is chosen has its true price."""
    monkeypatch.setattr(pricing, "MAX_PRICED_SINGLY", 0)
    monkeypatch.setattr(partners, "NUM_PRICED_EXACTLY", 2)
    rng = Random(6)
    for _ in range(60):
        workers, request, table = _cluster_at_random(rng)
        placement, links = placed(workers, request, table)
        if links is None:
            continue
        costs = {pair: cost for pair, cost in _costs(workers, request, links)}
        spread = request.num_tokens * float((links.most_ms - links.least_ms).max())
        assert min(costs.values()) - 1e-6 <= placement.predicted_ms <= min(costs.values()) + spread + 1e-6


def _cluster_at_random(rng: Random) -> tuple[list[WorkerSnapshot], PlacementRequest, PairTable]:
    def one(name: str) -> WorkerSnapshot:
        load = replace(LOAD, kv_bytes_per_s=rng.choice([2e5, 1e6]), prefill_tokens_per_s=rng.choice([4e3, 9e3]))
        shown = worker(name, load=load, backlog=rng.randrange(600), active=rng.randrange(20))
        return at(rng.choice("abc"), shown)

    workers = [one(f"d{i}") for i in range(rng.randint(2, 5))] + [one(f"p{i}") for i in range(rng.randint(2, 5))]
    request = PlacementRequest(
        num_tokens=rng.randint(100, 1500),
        matched={w.info.key.worker_id: rng.choice([0, 0, rng.randrange(1000)]) for w in workers},
    )
    table = PairTable()
    for prefill in (w for w in workers if w.info.key.worker_id.startswith("p")):
        for decode in (w for w in workers if w.info.key.worker_id.startswith("d")):
            for _ in range(rng.randrange(9)):
                exposed_s = rng.choice([0.0005, 0.02, 0.09])
                table.observe(prefill.info, decode.info, num_tokens=100, exposed_s=exposed_s, now_s=0.0)
    return workers, request, table


def _hindered(
    rng: Random, workers: list[WorkerSnapshot], request: PlacementRequest
) -> tuple[list[WorkerSnapshot], PlacementRequest]:
    """The same with penalties, workers that drain or are excluded, and a prefix that is to be copied."""
    workers = [replace(one, draining=rng.random() < 0.15, penalty_ms=rng.choice([0.0, 0.0, 300.0])) for one in workers]
    excluded = frozenset(one.info.key for one in workers if rng.random() < 0.1)
    return workers, replace(request, excluded=excluded, replicate_tokens=rng.choice([0, 0, 256, 700]))


def _costs(workers: list[WorkerSnapshot], request: PlacementRequest, links: PairLinks):
    """Yield every pair and its cost, each priced alone."""
    decoders = [w for w in workers if w.info.key.worker_id.startswith("d")]
    prefills = [w for w in workers if w.info.key.worker_id.startswith("p")]
    for row, decode in enumerate(decoders):
        yield (decode.info.key.worker_id, None), pair_cost(decode, None, workers, request, EXACT)
        uncached = request.num_tokens - held(decode, request)
        transfer_ms = uncached * 1e3 * decode.info.kv_bytes_per_token / decode.load.kv_bytes_per_s
        for other, prefill in enumerate(prefills):
            added = max(uncached * float(links.column(row)[other]), -transfer_ms)
            cost = pair_cost(decode, prefill, workers, request, EXACT)
            yield (decode.info.key.worker_id, prefill.info.key.worker_id), cost + added


@pytest.mark.parametrize("column", [list, np.array])
def test_pick_ties_costs_below_zero(column: Callable[[list[float]], Column]) -> None:
    """A link may save more than its prefill worker costs."""
    total, held, load = column([-100.0, -99.0, 5.0]), column([0.0, 16.0, 99.0]), column([0.0, 0.0, 0.0])
    assert partners.pick(total, held, load, CostModel(), Random(0)) == 1
