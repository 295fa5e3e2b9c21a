"""`tandem bench router` at the smallest scale: every figure is of real work."""

import argparse
import io
import json
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from cluster.simulator.inputs.agentic_load import AgenticSpec
from router.workers.prefix_map import PrefixMap
from tandem.errors import ConfigError
from tandem_bench.router import agentic, measure, options, placement, prefix_map, timing
from tandem_bench.router.workers import names, registry, stored


def test_bench_router_parts_are_those_named() -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    assert options.parts(parser.parse_args([])) == options.PARTS
    assert options.parts(parser.parse_args(["--only", "prefix_map"])) == ("prefix_map",)
    assert {*measure._PARTS, "doors", "first_token", "budget", "overload", "agentic"} == set(options.PARTS)


def test_least_us_runs_requested_rounds() -> None:
    rounds: list[int] = []
    assert timing.least_us(lambda: rounds.append(1), repeats=4) > 0.0
    assert len(rounds) == 4


def test_bench_placement_uses_both_pools() -> None:
    view = registry(Random(0), num_each=3).view()
    assert (len(view.decode.members), len(view.prefill.members)) == (3, 3)
    assert not view.decode.unmeasured
    assert placement._choice_us(3, 1) > 0.0
    assert placement._whole_us(3, 1) > 0.0
    assert placement._report_us(1) > 0.0


def test_bench_prefix_map_holds_stated_blocks() -> None:
    prefix_map_, blocks = PrefixMap(), names(Random(1), 20)
    worker = prefix_map._add(prefix_map_, 0, blocks)
    assert prefix_map_.longest_prefix(blocks) == {worker: 20}
    assert stored(blocks).snapshot
    assert prefix_map._lookup_us([5, 1024], 1) > 0.0
    holdings = prefix_map._holdings(8)
    assert {name: max(depths) for name, depths in holdings.items()}["one"] == prefix_map.NUM_BLOCKS


def test_bench_agentic_places_by_every_policy_and_judges_tandem() -> None:
    spec = agentic.spec_of(40, None)
    rows = {row.name: row for row in agentic.rows(spec, seeds=(1,), policies=(agentic.OURS, "approximate"))}
    assert len(rows) == 8
    judged = {name for name, row in rows.items() if row.goal is not None}
    assert judged == {"agentic.tandem.hit_rate", "agentic.tandem.ttft_p99"}
    for policy in (agentic.OURS, "approximate"):
        assert 0.1 < rows[f"agentic.{policy}.hit_rate"].value < 1.0
        assert 0.0 < rows[f"agentic.{policy}.ttft_p50"].value <= rows[f"agentic.{policy}.ttft_p99"].value


def _sessions(path: Path, *, calls: int) -> Path:
    """A trace of sessions whose every call adds one block of 512 tokens to a prompt, after an answer of 12."""
    rows = [
        {
            "timestamp": 0,
            "input_length": 512 * n,
            "output_length": 12,
            "hash_ids": [1000 * session + i for i in range(n)],
        }
        for session in range(20)
        for n in range(2, 2 + calls)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def _measured_agents(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, AgenticSpec]:
    """What `--only agentic` prints, and the load that it measures."""
    specs: list[AgenticSpec] = []
    monkeypatch.setattr(agentic, "rows", lambda spec: specs.append(spec) or [])
    parser, out = argparse.ArgumentParser(), io.StringIO()
    options.add_options(parser)
    given = parser.parse_args(["--only", "agentic", *arguments])
    await measure.measure(given, [], out=Console(file=out, width=200))
    return out.getvalue(), specs[0]


async def test_agents_have_built_in_lengths_wherever_the_repository_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said, spec = await _measured_agents("--requests", "30", monkeypatch=monkeypatch)
    assert spec == AgenticSpec(requests=30)
    assert "lengths built in; medians: growth 450, answers 120 tokens" in said


async def test_agents_have_the_lengths_of_a_given_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _sessions(tmp_path / "t.jsonl", calls=9)
    said, spec = await _measured_agents("--trace", str(trace), monkeypatch=monkeypatch)
    assert (round(spec.growth.median), round(spec.output.median)) == (500, 12)
    assert f"lengths from {trace}; medians: growth 500, answers 12 tokens" in said


async def test_agents_refuse_a_trace_without_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _sessions(tmp_path / "t.jsonl", calls=2)
    with pytest.raises(ConfigError, match=r"--trace: .* has too few requests that continue another"):
        await _measured_agents("--trace", str(trace), monkeypatch=monkeypatch)
