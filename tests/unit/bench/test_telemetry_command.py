"""What `tandem bench telemetry` makes of its turns: costs against the cluster without, and nothing without spans."""

import asyncio
from dataclasses import replace

import pytest

from bench.errors import CannotMeasure
from bench.telemetry_bench import options
from bench.telemetry_bench.measure import KINDS, OFF, PARTS, _rows
from bench.telemetry_bench.receiver import span_counter
from bench.telemetry_bench.turns import LOADS, ROLES, Turn
from tandem.otlp import OtlpSink
from tests.unit.test_otlp import span

TURN = Turn(
    requests_per_s=100.0,
    tokens_per_s=800.0,
    cpu_ms={"router": 1.0, "decode": 2.0, "prefill": 5.0},
    num_requests=300,
    num_spans=3000,
)
SLOWER = replace(TURN, requests_per_s=80.0, cpu_ms={**TURN.cpu_ms, "router": 1.5})


def test_costs_are_against_the_same_rounds_without() -> None:
    load = LOADS[0]
    turns = {(load, kind): [TURN, TURN, TURN] for kind in (OFF, *KINDS)}
    turns[load, KINDS[1]] = [SLOWER, TURN, SLOWER]
    rows = {row.name: row for row in _rows(turns, load, "cluster")}
    lost = rows[f"cluster, {load.name}: production, throughput lost"]
    assert (lost.value, lost.met) == (pytest.approx(25.0), False)
    assert rows[f"cluster, {load.name}: production, more CPU"].value == pytest.approx(100 * 0.5 / 8)
    assert rows[f"cluster, {load.name}: production, more CPU of router"].value == pytest.approx(50.0)
    assert all(
        rows[f"cluster, {load.name}: every trace, more CPU of {role}"].value == pytest.approx(0.0) for role in ROLES
    )
    assert {row.met for row in rows.values()} == {None, False}


def test_parts_are_those_that_the_command_names() -> None:
    assert tuple(PARTS) == options.PARTS


def test_what_was_not_traced_has_no_cost() -> None:
    load = LOADS[0]
    turns = {(load, kind): [replace(TURN, num_spans=0)] for kind in (OFF, *KINDS)}
    with pytest.raises(CannotMeasure, match="every trace"):
        _rows(turns, load, "cluster")


async def test_spans_are_counted() -> None:
    async with span_counter() as counter:
        sink = OtlpSink(counter.url, {}, {})
        for number in range(1, 8):
            sink.take(span(number))
        await asyncio.to_thread(sink.close)
    assert counter.num_spans == 7
