"""Releases that share a Prometheus are judged separately: alerts name the affected one only."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring_files import RULE_TESTS, RULES, promtool, rules
from tests.support.two_releases import GROUPING, mixing, of_release, two_releases

# Where a maximum or an absence would hide one release behind another.
IN_CI = ("cluster", "planner")


def test_rules_never_mix_releases() -> None:
    assert [
        (rule.get("alert") or rule["record"], mixing(rule["expr"])) for rule in rules() if mixing(rule["expr"])
    ] == []


@pytest.mark.parametrize(
    "expr",
    [
        "sum(a)",
        "max by (namespace) (a)",
        "topk(10, sum by (namespace, app_kubernetes_io_instance) (a))",
        "sum by (namespace, app_kubernetes_io_instance) (a) / on () group_left () b",
    ],
)
def test_mixing_check_finds_a_rule_over_releases(expr: str) -> None:
    assert len(mixing(expr)) == 1


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in IN_CI else pytest.mark.slow, id=path.stem) for path in RULE_TESTS],
)
def test_alerts_name_the_release_in_trouble(path: Path, tmp_path: Path) -> None:
    suite = yaml.safe_load(path.read_text())
    files = [(path.parent / one).resolve() for one in suite["rule_files"]]
    assert set(files) <= set(RULES)
    made = tmp_path / path.name
    made.write_text(yaml.safe_dump(two_releases(path, files)))
    promtool("test", "rules", made)


def test_quality_alert_compares_a_release_with_itself(tmp_path: Path) -> None:
    strong, weak = ("prod", "chat"), ("staging", "chat")
    probe = 'tandem_quality_loss_nats{worker="decode-0", role="decode"}'
    loss = {strong: "2.5x240", weak: "3.1x120 3.2x120"}
    series = [{"series": of_release(probe, release), "values": values} for release, values in loss.items()]
    firing = 'ALERTS{alertname="TandemQualityLost", alertstate="firing"}'
    queries: list[dict[str, Any]] = [
        {"expr": firing, "eval_time": "59m", "exp_samples": []},
        {
            "expr": f"count by ({', '.join(GROUPING)}) ({firing})",
            "eval_time": "90m",
            "exp_samples": [{"labels": of_release("", weak), "value": 1}],
        },
    ]
    [errors] = [str(path) for path in RULES if path.stem == "errors"]
    case = {"interval": "30s", "input_series": series, "promql_expr_test": queries}
    made = tmp_path / "tests.yaml"
    made.write_text(yaml.safe_dump({"rule_files": [errors], "evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", made)
