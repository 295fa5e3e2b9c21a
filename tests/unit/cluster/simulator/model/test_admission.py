"""Production's admission before a simulated router: waits, refusals, and no lost request."""

from dataclasses import replace

import pytest

from cluster.simulator.model.faults import FaultSpec, draw_faults
from cluster.simulator.model.report import Slo, report_on
from cluster.simulator.model.request import SimRequest
from cluster.simulator.model.settings import unlimited_admission
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.capacity import what_breaks
from router.admission.cluster_capacity import CapacityPolicy, Shortage
from router.admission.counts import Rejection
from router.admission.types import AdmissionPolicy
from tests.support.cluster.bound_clusters import QUEUE, Bottleneck, held, run_until_queue
from tests.support.cluster.small_clusters import cluster, load
from tests.unit.cluster.simulator.model.test_simulation import audit


def simulated(policy: AdmissionPolicy | None, *, sizes: tuple[int, int] = (1, 1), rate: float = 200.0) -> Simulation:
    simulation = Simulation(replace(cluster(*sizes), admission=policy), load(rate=rate), Choosing(), seed=1)
    simulation.run()
    return simulation


@pytest.mark.parametrize("sizes", [(1, 1), (0, 1)], ids=["disaggregated", "colocated"])
def test_simulated_admission_without_room_queues_and_runs_later(sizes: tuple[int, int]) -> None:
    simulation = simulated(AdmissionPolicy(room=CapacityPolicy(max_running_per_worker=4)), sizes=sizes)
    counts = simulation.router.admission.fair.counts
    assert len(simulation.router.outcomes.finished) == counts.num_turns == 60
    assert counts.waited_s > 1.0
    assert simulation.router.admission.fair.num_inflight == 0
    audit(simulation)


def test_simulated_admission_local_prefill_turn_runs_on_the_decode_worker() -> None:
    """As behind a real gate: others wait for the prefill pool."""
    pools = cluster(1, 4, num_blocks=1000)
    spec = replace(pools, admission=AdmissionPolicy(room=CapacityPolicy(worker_backlog_s=0.05)))
    simulation = Simulation(spec, load(rate=60.0, requests=100, prefix=192, prompt=300.0), Choosing(), seed=1)
    placed: list[tuple[bool, bool]] = []
    submit = simulation.router._send

    def watched(request: SimRequest) -> None:
        assert request.entry is not None
        assert request.assignment is not None
        placed.append((request.entry.is_local, request.assignment.computing == request.assignment.decode))
        submit(request)

    simulation.router._send = watched
    simulation.run()
    assert all(is_read_there for is_local, is_read_there in placed if is_local)
    assert sum(is_local for is_local, _ in placed) > 5 < sum(not is_read_there for _, is_read_there in placed)


def test_simulated_admission_predicted_long_wait_is_refused() -> None:
    policy = AdmissionPolicy(max_queue_s=0.2, room=CapacityPolicy(max_running_per_worker=2, worker_backlog_s=0.05))
    simulation = simulated(policy)
    outcomes, counts = simulation.router.outcomes, simulation.router.admission.fair.counts
    assert 0 < outcomes.num_rejected == counts.rejections[Rejection.QUEUE_TIME] + counts.rejections[Rejection.HOPELESS]
    assert len(outcomes.finished) + outcomes.num_rejected == 60
    audit(simulation)


def test_report_rejected_request_counts_as_a_missed_first_token() -> None:
    policy = AdmissionPolicy(max_queue_s=0.2, room=CapacityPolicy(max_running_per_worker=2, worker_backlog_s=0.05))
    simulation = simulated(policy)
    report = report_on(simulation, Slo(ttft_s=1e3, itl_s=1e3), policy="tandem", seed=1)
    assert report.num_rejected > 1
    assert report.ttft_within == pytest.approx(1.0 - report.num_rejected / 60)
    assert not report.held
    assert what_breaks(report) == "TTFT"


def test_simulated_admission_full_queue_rejects_the_next() -> None:
    simulation = simulated(AdmissionPolicy(max_requests=3, room=CapacityPolicy(max_running_per_worker=2)))
    counts = simulation.router.admission.fair.counts
    assert 0 < simulation.router.outcomes.num_rejected == counts.rejections[Rejection.QUEUE_FULL]


def test_simulated_admission_unlimited_without_decode_queues_nothing() -> None:
    simulation = simulated(unlimited_admission(), sizes=(2, 0))
    counts = simulation.router.admission.fair.counts
    assert (counts.num_turns, counts.waited_s, simulation.router.outcomes.num_rejected) == (60, 0.0, 0)


def test_simulated_admission_queued_requests_outlive_a_worker() -> None:
    spec = replace(cluster(0, 2), admission=AdmissionPolicy(room=CapacityPolicy(max_running_per_worker=4)))
    trace = load(rate=60.0)
    simulation = Simulation(spec, trace, Choosing(), seed=1)
    for fault in draw_faults(FaultSpec.parse("crash=3,restart=1"), spec, trace.span_s, 1):
        simulation.strike(fault)
    simulation.run()
    assert simulation.num_faults
    assert len(simulation.router.outcomes.finished) == 60
    audit(simulation)


@pytest.mark.parametrize("bottleneck", ["prefill", "decode"])
def test_simulated_admission_reports_the_full_pool_it_waits_for(bottleneck: Bottleneck) -> None:
    seen: dict[Shortage, int] = {}
    run_until_queue(bottleneck, lambda simulation: seen.update(held(simulation)))
    assert seen.keys() == {Shortage(bottleneck)}
    assert seen[Shortage(bottleneck)] >= QUEUE
