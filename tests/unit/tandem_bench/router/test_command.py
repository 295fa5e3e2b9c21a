"""`tandem bench router` at the smallest scale: every figure is of real work."""

import argparse
from random import Random

from router.workers.prefix_map import PrefixMap
from tandem_bench.router import agentic, measure, options, placement, prefix_map, timing
from tandem_bench.router.workers import names, registry, stored


def test_bench_router_parts_are_those_named() -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    assert options.parts(parser.parse_args([])) == options.PARTS
    assert options.parts(parser.parse_args(["--only", "prefix_map"])) == ("prefix_map",)
    assert {*measure._PARTS, "doors", "overload", "agentic"} == set(options.PARTS)


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
    rows = {row.name: row for row in agentic.rows(40, seeds=(1,), policies=(agentic.OURS, "approximate"))}
    assert len(rows) == 8
    judged = {name for name, row in rows.items() if row.goal is not None}
    assert judged == {"agentic.tandem.hit_rate", "agentic.tandem.ttft_p99"}
    for policy in (agentic.OURS, "approximate"):
        assert 0.1 < rows[f"agentic.{policy}.hit_rate"].value < 1.0
        assert 0.0 < rows[f"agentic.{policy}.ttft_p50"].value <= rows[f"agentic.{policy}.ttft_p99"].value
