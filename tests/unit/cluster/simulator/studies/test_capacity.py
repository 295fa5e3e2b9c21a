"""The capacity search, and trials that end before their last request."""

import pytest

from cluster.simulator.model.report import Report, Slo, report_on
from cluster.simulator.model.settings import ClusterSpec
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.capacity import Trial, capacity, sweep, sweep_table, what_breaks
from tests.support.cluster.small_clusters import cluster, load


class WholeTrial(Trial):
    """Runs every request to its end."""

    def run(self, spec: ClusterSpec, *, speed: float = 1.0) -> Report:
        simulation = Simulation(spec, self.trace.stretched(1.0 / speed), self.choosing, seed=self.seed)
        simulation.run()
        return report_on(simulation, self.slo, policy=self.choosing.policy, seed=self.seed)


@pytest.mark.parametrize(
    ("sizes", "slo"),
    [
        ((1, 1), Slo(ttft_s=0.3, itl_s=1.0)),
        ((0, 2), Slo(ttft_s=5.0, itl_s=0.012)),
        ((0, 2), Slo(ttft_s=0.3, itl_s=0.03)),
    ],
    ids=["TTFT", "ITL", "both"],
)
def test_capacity_trial_ending_early_gives_same_result(sizes: tuple[int, int], slo: Slo) -> None:
    trace = load(requests=100)
    cut, whole = (
        capacity(kind(trace=trace, slo=slo, choosing=Choosing(), seed=1), cluster(*sizes), halvings=2)
        for kind in (Trial, WholeTrial)
    )
    assert cut.requests_per_s == whole.requests_per_s
    assert cut.report == whole.report
    assert set(cut.breaks.split(" and ")) <= set(whole.breaks.split(" and "))


def test_capacity_trial_ends_at_broken_objective() -> None:
    trial = Trial(trace=load(requests=100), slo=Slo(ttft_s=0.05, itl_s=5.0), choosing=Choosing(), seed=1)
    report = trial.run(cluster(1, 1), speed=50.0)
    assert report.num_finished < report.num_requests
    assert not report.held
    assert what_breaks(report) == "TTFT"


def test_ratio_sweep_names_winner() -> None:
    trial = Trial(trace=load(requests=60), slo=Slo(ttft_s=0.5, itl_s=0.05), choosing=Choosing(), seed=1)
    rows = sweep(trial, 2, lambda p: cluster(p, 2 - p))
    assert [(prefill, decode) for prefill, decode, _ in rows] == [(0, 2), (1, 1)]
    assert all(found.requests_per_s > 0.0 for _, _, found in rows)
    assert "wins" in sweep_table(rows).splitlines()[-1]
