"""The recorded signals tell the pools apart, by Prometheus' own rule tests: a pool grows for its own line alone."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.chart.rendering import NAMESPACE, RELEASE, render
from tests.chart.value_sets import GOOD

pytestmark = pytest.mark.slow
_OURS = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="{RELEASE}"'
_ROUTERS = 2  # each shows every worker


class Line(NamedTuple):
    prefill: float
    """Waits at prefill workers."""
    decode: float
    queue: float
    """Waits in all routers' queues."""


CASES = [
    # waiting requests, waiting tokens: what is seen, and what each pool is told
    (Line(8, 0, 10), Line(4000, 0, 20000), (18, 0), (24000, 0)),
    (Line(0, 0, 10), Line(0, 0, 20000), (0, 10), (0, 20000)),  # a full decode pool refuses
    (Line(6, 2, 8), Line(3000, 1000, 4000), (12, 4), (6000, 2000)),
    (Line(0, 3, 0), Line(0, 700, 0), (0, 3), (0, 700)),
    (Line(0, 0, 0), Line(0, 0, 0), (0, 0), (0, 0)),
]


def _series(requests: Line, tokens: Line) -> dict[str, float]:
    seen: dict[str, float] = {
        f'tandem_queue_requests{{namespace="{NAMESPACE}",app_kubernetes_io_instance="another"}}': 1000
    }
    for router in range(_ROUTERS):
        at = f'{_OURS},pod="router-{router}"'
        for role in ("prefill", "decode"):
            worker = f'{at},worker="{role}-0",role="{role}"'
            seen[f'tandem_worker_requests{{{worker},state="waiting"}}'] = getattr(requests, role)
            seen[f'tandem_worker_requests{{{worker},state="running"}}'] = 99
            seen[f"tandem_worker_backlog_tokens{{{worker}}}"] = getattr(tokens, role)
        seen[f"tandem_queue_requests{{{at}}}"] = requests.queue / _ROUTERS
        seen[f"tandem_queue_tokens{{{at}}}"] = tokens.queue / _ROUTERS
    return seen


def _expected(name: str, told: tuple[float, float]) -> dict[str, Any]:
    samples = [
        {"labels": f'{name}{{namespace="{NAMESPACE}", pool="{pool}", release="{RELEASE}"}}', "value": value}
        for pool, value in zip(("prefill", "decode"), told, strict=True)
    ]
    return {"expr": name, "eval_time": "30s", "exp_samples": samples}


def _promtool(*arguments: str) -> None:
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.fail("no promtool: it is in Debian's package prometheus; or say where it is with PROMTOOL=/path")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_pool_is_told_of_its_own_line(tmp_path: Path) -> None:
    rules, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    rules.write_text(yaml.safe_dump(render(GOOD["hpa"]).named("PrometheusRule", "-scaling")["spec"]))
    cases = [
        {
            "interval": "15s",
            "input_series": [{"series": name, "values": f"{value}x4"} for name, value in _series(seen, held).items()],
            "promql_expr_test": [
                _expected("tandem_pool_waiting_requests", requests),
                _expected("tandem_pool_waiting_tokens", tokens),
            ],
        }
        for seen, held, requests, tokens in CASES
    ]
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": cases}))
    _promtool("check", "rules", str(rules))
    _promtool("test", "rules", str(tests))
