"""The scheduling and eviction benches report correct figures, speed aside."""

import json
from pathlib import Path

import pytest

from tandem_bench.scheduler import eviction, step_cost


def test_bench_step_cost_is_split_into_parts() -> None:
    cost = step_cost.measure(num_seqs=4, num_blocks=1024, num_steps=20)
    assert (cost.num_seqs, cost.num_blocks) == (4, 1024)
    assert 0.0 < cost.least_ms <= cost.total_ms <= cost.p99_ms
    assert cost.schedule_ms + cost.inputs_ms + cost.commit_ms == pytest.approx(cost.total_ms, rel=0.5)


def test_bench_steady_batch_never_preempts() -> None:
    run = step_cost.NullRun(num_seqs=8, num_blocks=1024)
    for _ in range(40):
        run.step()
    load = run.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_backlog_tokens) == (8, 0, 8)


@pytest.mark.parametrize("policy", [*eviction.POLICIES, eviction.BEST])
def test_eviction_replay_of_unbounded_pool_finds_every_repeat(policy: str) -> None:
    trace = [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [9], [1, 2, 4]]
    assert eviction.replay(trace, policy=policy, num_blocks=100) == pytest.approx((2 + 3 + 3) / 14)


def test_eviction_replay_of_small_pool_finds_less() -> None:
    trace = eviction.mixture(num_requests=120)
    small, large = (eviction.replay(trace, policy="lru", num_blocks=n) for n in (150, 5_000))
    assert 0.0 < small < large < 1.0


def test_eviction_policies_stay_below_clairvoyant_one() -> None:
    trace = eviction.mixture(num_requests=300)
    for size in (150, 500):
        found = {rate.policy: rate.rate for rate in eviction.compare(trace, name="t", pools=(size,))}
        best = found.pop(eviction.BEST)
        assert best > max(found.values())


def test_eviction_traces_are_read_if_present(tmp_path: Path) -> None:
    assert [name for name, _ in eviction.traces(tmp_path)] == [eviction.BUILT_IN]
    lines = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ids} for ids in ([0, 1], [0, 2])]
    file = tmp_path / eviction.FILES["conversation"]
    file.write_text("\n".join(map(json.dumps, lines)))
    name, trace = next(eviction.traces(tmp_path))
    rates = eviction.compare(trace, name=name, pools=(10,))
    assert [(rate.trace, rate.policy, rate.rate) for rate in rates] == [
        ("conversation", policy, 0.25) for policy in (*eviction.POLICIES, eviction.BEST)
    ]
