"""Traces, latencies and options: parsed exactly, and refused by name if invalid."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.simulator.command import PlanOptions, SimulateOptions, plan_cluster, simulate
from cluster.simulator.inputs.agentic_load import AgenticSpec, LengthSpread, calibrated, generate_agentic
from cluster.simulator.inputs.block_names import SpacedNames, TraceHasher, own_name, trace_name
from cluster.simulator.inputs.generated_load import LoadSpec, generate
from cluster.simulator.inputs.latency import StepLatency, StepWork
from cluster.simulator.inputs.latency_files import fit_steps, load_latency
from cluster.simulator.inputs.trace import TraceRequest
from cluster.simulator.inputs.trace_files import load_trace
from cluster.simulator.model.gap_histogram import GapHistogram, percentile
from cluster.simulator.model.report import Slo
from cluster.simulator.studies.shared_cache_bound import shared_cache, utilised
from tandem.errors import ConfigError
from tests.support.cluster.small_clusters import load

ROWS = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 900, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_mooncake_trace_names_full_blocks_and_separates_tails(mooncake: Path) -> None:
    trace = load_trace(mooncake)
    assert trace.block_tokens == 512
    assert [r.arrival_s for r in trace.requests] == [0.0, 0.5, 0.9]
    assert trace.requests[1].names == (trace_name(0), trace_name(1), trace_name(3))
    assert [r.tail for r in trace.requests] == [2, 4, 0]


def test_shared_cache_counts_prefix_hits(mooncake: Path) -> None:
    trace = load_trace(mooncake)
    # Of the last prompt one block: its last token must be computed.
    assert shared_cache(trace, 100).cached_tokens == (0, 1024, 512)
    assert shared_cache(trace, 4).cached_tokens == (0, 1024, 512)


def test_utilised_stretches_trace_to_requested_share(mooncake: Path) -> None:
    trace, latency = load_trace(mooncake), StepLatency(prompt_token_s=1e-3)
    ideal = shared_cache(trace, 100)
    stretched = utilised(trace, ideal, latency, num_workers=2, share=0.5)
    assert stretched.span_s * 2 * 0.5 == pytest.approx((1100 + 1600 - 1024 + 512) * 1e-3)


def test_trace_coarse_clock_spreads_simultaneous_requests() -> None:
    trace = load(requests=6)
    times = [0.0, 0.0, 0.0, 3.0, 9.0, 9.0]
    coarse = replace(trace, requests=tuple(replace(r, arrival_s=t) for r, t in zip(trace.requests, times, strict=True)))
    spread = coarse.spread()
    assert [r.arrival_s for r in spread.requests] == pytest.approx([0.0, 1.0, 2.0, 3.0, 9.0, 12.0])
    assert [r.names for r in spread.requests] == [r.names for r in trace.requests]
    assert spread.spread() == spread


def test_azure_trace_shares_no_prefix(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    trace = load_trace(path)
    assert [r.num_prompt_tokens for r in trace.requests] == [374, 396]
    assert trace.span_s == pytest.approx(4.314579)
    assert shared_cache(trace, 100).hit_rate == 0.0


@pytest.mark.parametrize(
    "content", ["", "{}", '{"timestamp": 0, "input_length": 2000, "output_length": 1, "hash_ids": [1]}']
)
def test_trace_malformed_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"invalid trace|no request"):
        load_trace(path)
    with pytest.raises(ConfigError, match="a trace must be"):
        load_trace(tmp_path / "trace.txt")


def test_generated_load_has_requested_rate_and_shared_prefixes() -> None:
    trace = load(400)
    assert trace.requests == load(400).requests != load(400, seed=4).requests
    assert len(trace.requests) / trace.span_s == pytest.approx(6.0, rel=0.3)
    assert shared_cache(trace, 100_000).hit_rate > 0.3
    alone = generate(LoadSpec(requests=200, prefixes=0, turns=1.0), 1)
    assert shared_cache(alone, 100_000).hit_rate == 0.0


def test_agentic_load_repeats_sessions_and_pauses_for_tools() -> None:
    spec = AgenticSpec(requests=300)
    trace = generate_agentic(spec, 3)
    assert trace == generate_agentic(spec, 3)
    assert len(trace.requests) == 300
    sessions: dict[int, list[TraceRequest]] = {}
    for request in trace.requests:
        sessions.setdefault(request.tail, []).append(request)
    num_shared = spec.instruction_tokens // spec.block
    assert len({request.names[:num_shared] for request in trace.requests}) == spec.kinds
    for calls in sessions.values():
        for before, after in pairwise(calls):
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert after.names[: len(before.names)] == before.names
            assert after.arrival_s > before.arrival_s + before.num_output_tokens * spec.token_s


def test_agentic_load_is_calibrated_only_by_session_traces() -> None:
    spec = AgenticSpec(requests=2_000)
    longer = replace(spec, growth=LengthSpread(median=2_000.0, sigma=0.5))
    found = calibrated(spec, generate_agentic(longer, 4))
    assert found.growth.median == pytest.approx(2_000.0, rel=0.2)
    assert found.output.median == pytest.approx(spec.output.median, rel=0.2)
    assert calibrated(spec, generate(LoadSpec(requests=50), 1)) == spec


def test_trace_names_expand_to_engine_blocks() -> None:
    names = SpacedNames([own_name(1, 0), own_name(1, 1)], 64)
    assert len(names) == 8
    assert names[3] == own_name(1, 0) == names[0]
    assert names[3::4] == [own_name(1, 0), own_name(1, 1)]
    assert list(names[:5]) == [own_name(1, 0)] * 4 + [own_name(1, 1)]
    chain = [own_name(1, 0)]
    TraceHasher(64).extend(own_name(1), chain, range(64 * 3 + 5))
    assert chain == [own_name(1, index) for index in range(3)]


def test_latency_is_loaded_from_published_tables(tmp_path: Path) -> None:
    fit = {
        "prefill": [20.0, 0.1, 1e-6],
        "decoding_smallbs": [15.0, 5e-4, 0.04],
        "decoding_large_small_bs_threshold": 95,
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"facebook/opt-13b": {"1": fit}}))
    latency = load_latency(f"{path}#facebook/opt-13b/1")
    assert latency.step_s == pytest.approx(0.015)
    assert latency.kv_bytes_per_token == 819_200
    assert latency.prompt_seconds(0, 2048, 2048) == pytest.approx(0.020 + 0.1e-3 * 2048 + 1e-9 * 2048 * 2049)
    rows = tmp_path / "table.csv"
    rows.write_text(
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
        + "".join(
            f"llama2-70b,h100,{p},{b},128,{10 + 0.05 * p * b},{20 + 0.5 * b},8\n"
            for p in (128, 512, 2048)
            for b in (1, 4)
        )
    )
    fitted = load_latency(f"{rows}#llama2-70b/h100/8")
    assert fitted.step_s == pytest.approx(0.020, rel=0.01)
    assert fitted.row_s == pytest.approx(0.5e-3, rel=0.01)
    with pytest.raises(ConfigError, match="known by name: "):
        load_latency("no-such-profile")


def test_step_latency_fit_recovers_parameters() -> None:
    latency = StepLatency(step_s=0.01, prompt_token_s=1e-4, pair_s=1e-8, row_s=1e-3, context_token_s=1e-6)
    works = [StepWork(n, n * (n + 1) // 2, 0, 0) for n in (64, 256, 1024)]
    works += [StepWork(0, 0, rows, rows * context) for rows in (1, 4, 16) for context in (64, 512)]
    fitted = fit_steps(works, [latency.seconds(work) for work in works])
    for name in ("step_s", "prompt_token_s", "pair_s", "row_s", "context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(latency, name), rel=1e-3)


def test_gap_histogram_is_accurate_to_one_percent() -> None:
    gaps = GapHistogram()
    for i in range(1, 1001):
        gaps.add(i / 1e3)
    assert gaps.percentile(50) == pytest.approx(0.5, rel=0.01)
    assert gaps.percentile(99) == pytest.approx(0.99, rel=0.01)
    assert gaps.share_within(0.25) == pytest.approx(0.25, rel=0.02)
    assert gaps.mean_s == pytest.approx(0.5005)
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "e2e=3", "itl=0"])
def test_slo_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


def test_simulate_prints_policies_side_by_side(mooncake: Path, tmp_path: Path) -> None:
    text = simulate(SimulateOptions(trace=mooncake, policies=("random", "tandem"), plots=tmp_path / "plots"))
    assert text.splitlines()[0].split() == ["random", "tandem"]
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["policies.png", "times.png"]
    result = json.loads(simulate(SimulateOptions(trace=mooncake, prefill=2, placement=True, as_json=True)))
    assert result["share_of_shared_cache"].keys() == {"tandem"}


def test_simulate_sweeps_pool_ratio() -> None:
    options = SimulateOptions(generate="requests=30,rate=4,output=20", prefill=1, decode=1, slo="ttft=1,itl=0.05")
    text = simulate(SimulateOptions(**{**_fields(options), "sweep": True}))
    assert "colo 2" in text
    assert "1:1" in text
    assert "wins" in text.splitlines()[-1]


def test_plan_is_minimal_and_explained(tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({"step_s": 0.01, "prompt_token_s": 1e-4, "row_s": 1e-3}))
    load = SimulateOptions(generate="requests=60,rate=6,output=20,block=16", slo="ttft=1,itl=0.05", as_json=True)
    options = PlanOptions(load=load, workers=(f"gpus=1,kv_tokens=20000,latency={slow}",), max_gpus=8)
    plans = json.loads(plan_cluster(options))
    assert [p["design"] for p in plans if p["report"] is not None]
    best = plans[0]
    assert best["report"]["held"]
    assert best["gpus"] == min(p["gpus"] for p in plans if p["report"] is not None)
    assert all("misses" in why for why in best["why"])
    text = plan_cluster(
        PlanOptions(load=SimulateOptions(**{**_fields(load), "as_json": False}), workers=options.workers)
    )
    lines = text.splitlines()
    assert lines[0].startswith("load: 60 requests, ")
    assert lines[1].startswith("objectives: 99% of first tokens within 1 s, 99% of the others within 0.05 s")
    assert lines[-1].startswith("cheapest: ")
    assert f"{best['gpus']} GPU" in lines[-1]
    assert sum(p["design"] in line for line in lines[4 : 4 + len(plans)] for p in plans) == len(plans)
    with pytest.raises(ConfigError, match="--worker must be"):
        plan_cluster(PlanOptions(load=load, workers=("gpus=1",)))


def _fields(options: SimulateOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SimulateOptions(), "either --trace or --generate"),
        (SimulateOptions(generate="speed=3"), "'speed' is unknown"),
        (SimulateOptions(generate="rate=0"), "rate must be above 0"),
        (SimulateOptions(generate="rate=1", policies=("best",)), "--policy"),
        (SimulateOptions(generate="requests=5", faults="fire=1"), "--faults"),
    ],
)
def test_simulate_invalid_options_are_refused(options: SimulateOptions, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        simulate(options)
