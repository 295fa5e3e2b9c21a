"""Whole simulations: every request is answered, nothing leaks, and the same seed gives the same bytes."""

import json

import pytest

from cluster.simulator.model.faults import FaultSpec, draw_faults
from cluster.simulator.model.policies import POLICIES
from cluster.simulator.model.report import Slo, report_on, table
from cluster.simulator.model.settings import ClusterSpec
from cluster.simulator.model.simulation import Choosing, Simulation
from tandem.errors import ConfigError
from tests.support.cluster.small_clusters import cluster, load


def simulated(spec: ClusterSpec, *, policy: str = "tandem", seed: int = 1, faults: str = "", **changes: object):
    trace = load(**changes)
    simulation = Simulation(spec, trace, Choosing(policy=policy), seed=seed)
    for fault in draw_faults(FaultSpec.parse(faults), spec, trace.span_s, seed):
        simulation.strike(fault)
    simulation.run()
    return simulation


def settle(simulation: Simulation) -> None:
    """Run what the last request has left behind."""
    simulation.events.run()


def audit(simulation: Simulation) -> None:
    settle(simulation)
    for worker in simulation.workers.live.values():
        worker.scheduler.check_invariants()
        load = worker.scheduler.load()
        assert (load.num_used_blocks, load.num_promised_blocks, load.num_backlog_tokens) == (0, 0, 0)
    for snapshot in simulation.registry.snapshots():
        assert snapshot.load.num_running + snapshot.load.num_waiting >= 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [(2, 2), (0, 3), (3, 0)], ids=["disaggregated", "colocated", "prefill only"])
def test_simulation_every_policy_answers_all_and_frees_all_blocks(policy: str, sizes: tuple[int, int]) -> None:
    simulation = simulated(cluster(*sizes), policy=policy)
    outcomes = simulation.router.outcomes
    assert len(outcomes.finished) == 60
    assert all(r.finished_s >= r.first_token_s > r.arrived_s for r in outcomes.finished)
    assert all(r.cached_tokens is not None and r.queued_s >= 0.0 for r in outcomes.finished)
    audit(simulation)


def test_simulation_is_deterministic_per_seed() -> None:
    def text(seed: int) -> str:
        simulation = simulated(cluster(), seed=seed, faults="crash=2,freeze=2", policy="random")
        return json.dumps(report_on(simulation, Slo(), policy="random", seed=seed).as_dict())

    assert text(1) == text(1)
    assert text(1) != text(2)


@pytest.mark.parametrize("sizes", [(2, 2), (0, 3)], ids=["disaggregated", "colocated"])
@pytest.mark.parametrize("seed", range(4))
def test_simulation_worker_failures_lose_no_request(sizes: tuple[int, int], seed: int) -> None:
    simulation = simulated(cluster(*sizes), seed=seed, faults="crash=4,freeze=3,restart=1,freeze_for=3", rate=12.0)
    assert simulation.num_faults >= 2
    assert len(simulation.router.outcomes.finished) == 60
    audit(simulation)


def test_simulation_resumed_request_gets_only_missing_tokens() -> None:
    simulation = simulated(cluster(0, 2), faults="crash=3,restart=1", rate=30.0, output=80.0)
    resumed = [r for r in simulation.router.outcomes.finished if r.num_output_tokens]
    assert resumed
    assert all(r.num_output_tokens < r.wanted.num_output_tokens for r in resumed)


def test_simulation_small_pool_queues_without_losses() -> None:
    simulation = simulated(cluster(2, 1, num_blocks=60), rate=60.0)
    assert len(simulation.router.outcomes.finished) == 60
    assert simulation.router.outcomes.num_retries
    audit(simulation)


def test_simulation_report_counts_match_trace() -> None:
    simulation = simulated(cluster())
    trace, report = simulation.trace, report_on(simulation, Slo(), policy="tandem", seed=1)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(trace.num_output_tokens)
    assert report.prompt_tokens_per_s * report.duration_s == pytest.approx(trace.num_prompt_tokens)
    # Each token but the first of a request has a gap before it.
    assert len(simulation.workers.gaps) == trace.num_output_tokens - len(trace.requests)
    assert 0.0 < report.hit_rate < 1.0
    assert report.held
    assert "token hit rate" in table([report])


def test_simulation_cached_decode_kv_is_not_transferred() -> None:
    simulation = simulated(cluster())
    finished = simulation.router.outcomes.finished
    most = sum(-(-r.wanted.num_prompt_tokens // 16) * 16 * 1024 for r in finished)
    assert 0 < simulation.workers.handoffs.num_kv_bytes < most


def test_simulation_snapshot_equals_applied_events() -> None:
    simulation = simulated(cluster())
    settle(simulation)
    for key, worker in simulation.workers.live.items():
        prefix_map = simulation.registry.prefix_map
        before = prefix_map.num_blocks(key.worker_id)
        simulation.registry.port(key).resync()
        settle(simulation)
        assert prefix_map.num_blocks(key.worker_id) == before == len(worker.scheduler.blocks.index)


def test_simulation_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy must be one of"):
        Simulation(cluster(), load(), Choosing(policy="best"), seed=1)
