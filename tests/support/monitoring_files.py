"""The files that Prometheus and Grafana read, as tests read them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "helm/tandem/rules").glob("*.yaml"))
DASHBOARDS = sorted((ROOT / "helm/tandem/dashboards").glob("*.json"))
_VARIABLES = {"__rate_interval": "1m", "__range": "1h", "namespace": ".*", "release": ".*"}
RULE_TESTS = sorted((ROOT / "tests/rules").glob("*.yaml"))


class UsedExpression(NamedTuple):
    """An expression, and where it is."""

    where: str
    expr: str


def promtool(*arguments: str | Path) -> str:
    """What it says; the test fails when it complains, or when there is none."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.fail("no promtool: `make promtool` installs one; or say where it is with PROMTOOL=/path")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> Iterator[dict[str, Any]]:
    """Every recording and alerting rule."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def alarms() -> dict[str, dict[str, Any]]:
    """Return the alerting rules by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def panels() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every panel of every dashboard that shows something."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield path, panel


def expressions() -> Iterator[UsedExpression]:
    """Of all rules and panels; Grafana's own variables are replaced by what it would put there."""
    for rule in rules():
        yield UsedExpression(rule.get("alert") or rule["record"], rule["expr"])
    for path, panel in panels():
        for target in panel["targets"]:
            yield UsedExpression(f"{path.stem}: {panel['title']}", without_variables(target["expr"]))


def without_variables(expr: str) -> str:
    """As Grafana sends it where all releases are chosen."""
    for name, value in _VARIABLES.items():
        expr = expr.replace(f"${name}", value)
    return expr
