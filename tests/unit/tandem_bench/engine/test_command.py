"""The engine bench's command: options, drawing of loads, and errors."""

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tandem_bench.engine import options, plot
from tandem_bench.engine.baselines import _BASELINES
from tandem_bench.engine.figures import Summary
from tandem_bench.engine.measure import Scale, make_subject, measure, pool_blocks
from tandem_bench.engine.rounds import Cell
from tandem_bench.errors import CannotMeasure
from tandem_bench.make_model import write_model
from tandem_bench.peers.environments import ENVIRONMENTS
from tandem_bench.report import Row, figure
from tandem_bench.scheduler import eviction, step_cost
from tandem_bench.shapes import SHAPES


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return parser.parse_args(arguments)


def test_bench_engine_option_names_match_modules() -> None:
    assert set(options.SHAPE_NAMES) == SHAPES.keys()
    assert set(options.PEER_NAMES) == ENVIRONMENTS.keys()
    assert set(options.BASELINE_NAMES) == _BASELINES.keys()


def test_bench_engine_flags_choose_parts_and_peers() -> None:
    assert options.parts(parsed()) == options.MODEL_PARTS
    assert options.parts(parsed("--full")) == options.PARTS
    assert options.parts(parsed("--baseline", "no-kv-cache")) == ("baselines",)
    assert options.parts(parsed("--only", "worker")) == ("worker",)
    assert options.peers(parsed()) == ()
    assert options.peers(parsed("--full")) == options.PEER_NAMES
    assert options.peers(parsed("--full", "--peer", "vllm")) == ("vllm",)
    assert options.peers(parsed("--full", "--bits", "4")) == ("vllm", "openvino", "llama.cpp")


def test_bench_engine_only_default_run_has_time_limit() -> None:
    assert Scale.from_options(parsed()).limit_s is not None
    assert Scale.from_options(parsed("--full")).limit_s is None
    peers = Scale.from_options(parsed("--peer", "vllm"))
    assert peers.limit_s is None
    assert peers.num_rounds == 3
    assert {cell.num_tokens for cell in peers.cells} == {128}


def test_bench_engine_worker_part_has_every_concurrency() -> None:
    assert [cell.concurrency for cell in Scale.from_options(parsed("--only", "worker")).worker_cells] == [1, 4, 16]
    assert [cell.concurrency for cell in Scale.from_options(parsed()).worker_cells] == [4]


def test_bench_engine_pool_holds_largest_job() -> None:
    cell = Cell(concurrency=16, prompt_tokens=512, num_tokens=128)
    assert 16 * 40 <= pool_blocks((cell,)) <= 16 * 44
    busy = Cell(concurrency=16, prompt_tokens=512, num_tokens=128, with_newcomers=True)
    assert pool_blocks((busy,)) > pool_blocks((cell,))


def test_bench_engine_model_with_short_context_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny"])
    given = parsed("--model", str(tmp_path), "--full")
    with pytest.raises(CannotMeasure, match="has a context of 1024 tokens"):
        make_subject(given, Scale.from_options(given), lambda _: None)


def test_bench_engine_settings_reach_engine_or_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny"])
    given = parsed("--model", str(tmp_path), "--set", "engine.prefill_chunk_tokens=64", "--threads", "1")
    stage = make_subject(given, Scale.from_options(given), lambda _: None).stage
    assert stage.overrides()["engine.prefill_chunk_tokens"] == 64
    assert stage.overrides()["engine.num_threads"] == 1
    given = parsed("--model", str(tmp_path), "--set", "router.port=1")
    with pytest.raises(CannotMeasure, match=r"engine\.KEY"):
        make_subject(given, Scale.from_options(given), lambda _: None)


def summary(contestant: str) -> Summary:
    return Summary(
        contestant=contestant,
        cell=Cell(concurrency=4, prompt_tokens=512, num_tokens=128),
        prefill_tokens_per_s=1000,
        decode_tokens_per_s=50,
        first_token_s=1,
        gap_p50_s=0.1,
        gap_p99_s=0.2,
        read_bytes_per_s=1e10,
        limit_share=0.5,
        flops_per_s=1e12,
        machine_bytes_per_s=2e10,
    )


def test_bench_engine_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CannotMeasure, match="pip install"):
        plot.draw(tmp_path / "a.png", [summary("tandem")], title="t")


def test_bench_engine_plot_is_a_png(tmp_path: Path) -> None:
    plot.draw(tmp_path / "a.png", [summary("tandem"), summary("somebody else")], title="t")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bench_engine_plot_of_many_or_busy_cells_is_a_png(tmp_path: Path) -> None:
    busy = replace(summary("tandem"), cell=Cell(concurrency=4, prompt_tokens=512, num_tokens=48, with_newcomers=True))
    for name, seen in (("many", [summary(f"engine {k}") for k in range(24)]), ("busy", [busy])):
        plot.draw(tmp_path / f"{name}.png", seen, title="t")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bench_engine_parts_without_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "traces", lambda _folder: iter([("small", eviction.mixture(num_requests=40))]))
    monkeypatch.setattr(eviction, "POOLS", (500,))
    monkeypatch.setattr(step_cost, "rows", lambda: [figure("16 sequences: step p50", 0.1, "ms")])
    rows: list[Row] = []
    out = Console(width=100, highlight=False)
    asyncio.run(measure(parsed("--only", "scheduling", "eviction"), rows, out=out, err=Console(stderr=True)))
    assert [row.name for row in rows] == [
        "16 sequences: step p50",
        *(f"eviction.small.{policy}.500".replace(" ", "_") for policy in (*eviction.POLICIES, eviction.BEST)),
    ]
    assert "500 blocks" in capsys.readouterr().out
