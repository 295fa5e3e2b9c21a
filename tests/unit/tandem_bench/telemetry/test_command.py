"""`tandem bench telemetry`: costs against the cluster without telemetry, and no result without spans."""

import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
import yaml

from tandem_bench.__main__ import TELEMETRY_PARTS
from tandem_bench.errors import CannotMeasure
from tandem_bench.telemetry import spans
from tandem_bench.telemetry.measure import KINDS, OFF, PARTS, SPANS, Kind, _rows
from tandem_bench.telemetry.receiver import span_counter
from tandem_bench.telemetry.turns import LOADS, ROLES, Turn
from tests.unit.tandem.telemetry.test_otel_pipeline import end_span, exporting

TURN = Turn(
    requests_per_s=100.0,
    tokens_per_s=800.0,
    cpu_ms={"router": 1.0, "decode": 2.0, "prefill": 5.0},
    num_requests=300,
    num_spans=3000,
)


def spans_of(turn: Turn, kind: Kind) -> Turn:
    """As if each trace had ten."""
    return replace(turn, num_spans=int(turn.num_requests * kind.sample_ratio * 10))


SLOWER = replace(TURN, requests_per_s=80.0, cpu_ms={**TURN.cpu_ms, "router": 1.5})


def test_bench_telemetry_costs_are_relative_to_same_rounds() -> None:
    load = LOADS[0]
    turns = {(load, kind): [spans_of(TURN, kind)] * 3 for kind in (OFF, *KINDS)}
    slower = spans_of(SLOWER, KINDS[1])
    turns[load, KINDS[1]] = [slower, spans_of(TURN, KINDS[1]), slower]
    rows = {row.name: row for row in _rows(turns, load, "cluster")}
    lost = rows[f"cluster, {load.name}: production, throughput lost"]
    assert (lost.value, lost.met) == (pytest.approx(25.0), False)
    error = rows[f"cluster, {load.name}: production, throughput lost, standard error"]
    assert error.value == pytest.approx(125.3 * stdev([1.25, 1.0, 1.25]) / 3**0.5)
    assert rows[f"cluster, {load.name}: production, more CPU"].value == pytest.approx(100 * 0.5 / 8)
    assert rows[f"cluster, {load.name}: production, more CPU of router"].value == pytest.approx(50.0)
    assert all(
        rows[f"cluster, {load.name}: every trace, more CPU of {role}"].value == pytest.approx(0.0) for role in ROLES
    )
    assert {row.met for row in rows.values()} == {None, False}


def test_bench_telemetry_parts_match_command() -> None:
    assert (SPANS, *PARTS) == TELEMETRY_PARTS


@pytest.mark.parametrize(("num_spans", "named"), [(0, "every trace"), (TURN.num_spans, "off again")])
def test_bench_telemetry_unswitched_cluster_cannot_be_measured(num_spans: int, named: str) -> None:
    load = LOADS[0]
    turns = {(load, kind): [replace(TURN, num_spans=num_spans)] for kind in (OFF, *KINDS)}
    with pytest.raises(CannotMeasure, match=named):
        _rows(turns, load, "cluster")


def test_bench_telemetry_switch_keeps_rest_of_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{secret: s, telemetry: {otlp_endpoint: 'http://a:1', sample_ratio: 0.0}, log_level: warning}")
    KINDS[1].rewrite(path)
    content = yaml.safe_load(path.read_text())
    assert content == {
        "secret": "s",
        "telemetry": {"otlp_endpoint": "http://a:1", "sample_ratio": KINDS[1].sample_ratio},
        "log_level": "info",
        "log_format": "json",
    }
    assert path.stat().st_mode & 0o077 == 0


def test_bench_telemetry_spans_part_measures_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_UNSAMPLED_CALLS", 3)
    monkeypatch.setattr(spans, "_SAMPLED_CALLS", 3)
    unsampled, sampled, encoded = spans.measure_spans()
    assert unsampled.unit == sampled.unit == encoded.unit == "CPU us/request"
    assert min(unsampled.value, sampled.value, encoded.value) > 0.0
    assert unsampled.value < sampled.value


async def test_span_counter_counts_exported_spans() -> None:
    async with span_counter() as counter:
        with exporting(int(counter.url.rpartition(":")[2])) as (tracer, pipeline):
            for _ in range(7):
                end_span(tracer)
            await asyncio.to_thread(pipeline.close)
    assert counter.num_spans == 7
