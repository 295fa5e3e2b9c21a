"""Rows: judgement of goals, and written and printed forms."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem_bench import report
from tandem_bench.report import Row, figure
from tandem_bench.spine.speed import kv_bytes_per_token, percentile


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        ({"at_most": 3}, True),
        ({"at_most": 2.9}, False),
        ({"at_least": 3}, True),
        ({"at_least": 3.1}, False),
        ({"below": 3.1}, True),
        ({"below": 3}, False),
    ],
)
def test_figure_goal_is_judged_by_bound(goal: dict[str, float], met: bool) -> None:
    row = figure("f", 3, "things", **goal)
    assert row.met is met
    assert row.goal is not None
    assert row.goal.endswith(f"{next(iter(goal.values())):g}")


def test_figure_without_goal_is_not_judged() -> None:
    assert figure("f", 1.5, "ms") == Row(name="f", value=1.5, unit="ms", goal=None, met=None)


def test_figure_nan_meets_no_goal() -> None:
    assert figure("f", float("nan"), "", at_most=1).met is False


def test_figure_with_two_goals_is_refused() -> None:
    with pytest.raises(ValueError, match="one goal"):
        figure("f", 1, "", at_most=1, at_least=1)


def test_report_json_round_trips(tmp_path: Path) -> None:
    rows = [figure("parity", 0, "prompts", at_most=0), figure("ttft", 12.5, "ms")]
    report.write_json(tmp_path / "rows.json", rows, about={"command": "tandem bench"})
    assert json.loads((tmp_path / "rows.json").read_text()) == {
        "about": {"command": "tandem bench"},
        "rows": [
            {"name": "parity", "value": 0, "unit": "prompts", "goal": "<= 0", "met": True},
            {"name": "ttft", "value": 12.5, "unit": "ms", "goal": None, "met": None},
        ],
    }
    assert report.read_json(tmp_path / "rows.json") == rows


def test_report_table_names_missed_goals() -> None:
    out = io.StringIO()
    rows = [figure("startup", 20.25, "s", below=15), figure("parity", 0, "[prompts]", at_most=0)]
    report.print_table(Console(file=out, width=100), rows)
    text = out.getvalue()
    assert "20.25" in text
    assert "NOT MET" in text
    assert "[prompts]" in text
    assert "1 goal not met: startup 20.25, expected < 15" in text
    assert report.num_missed(rows) == 1


def test_report_values_keep_four_digits_or_whole_numbers() -> None:
    values = (0.0, 1234567.0, 0.00001234, 99.5, 45112.34, float("nan"))
    assert [report.shown(v) for v in values] == ["0", "1,234,567", "1.234e-05", "99.5", "45,112", "nan"]


def test_report_circumstances_include_command_date_and_machine() -> None:
    shown = report.circumstances(["tandem", "bench", "engine", "--set", "engine.kv_dtype=int8 or so"])
    assert shown["command"] == "tandem bench engine --set 'engine.kv_dtype=int8 or so'"
    assert all(shown[name] for name in ("date", "version", "machine", "cpus", "python"))


def test_percentile_is_a_measured_value() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, p) for p in (1, 20, 50, 99, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    config = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 32}
    assert kv_bytes_per_token(config) == 4096
