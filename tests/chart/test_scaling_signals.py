"""The recorded signals by Prometheus' own rule tests: each pool scales by its own queue alone."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.chart.schema import CHART
from router.admission.cluster_capacity import Shortage
from tests.chart.rendering import NAMESPACE, RELEASE, render
from tests.chart.value_sets import GOOD
from tests.support.cluster.bound_clusters import QUEUE, Bottleneck, exposition, run_until_queue

pytestmark = pytest.mark.slow
_OURS = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="{RELEASE}"'
_ROUTERS = 2  # each shows every worker
_SIGNALS = ("tandem_ready", "tandem_queue_", "tandem_refused_", "tandem_worker_requests", "tandem_worker_backlog_")


SIGNALS = ("tandem_pool_waiting_requests", "tandem_pool_waiting_tokens", "tandem_pool_use")


class Line(NamedTuple):
    """Queues, in requests of a hundred tokens each."""

    prefill: float = 0
    """At prefill workers."""
    decode: float = 0
    reserved: float = 0
    """At decode workers, for the prefill pool."""
    lacks: Mapping[str, float] = {}
    """In all routers' queues, by what they lack."""
    refused: float = 0
    """By all decode workers."""


CASES = [
    # what is measured, and the requests and tokens that are reported for each pool
    (Line(prefill=1, reserved=1, lacks={"prefill": 40}), (41, 0), (4100, 0)),
    (Line(prefill=8, lacks={"prefill": 10}), (18, 0), (1800, 0)),
    (Line(lacks={"decode": 40}), (0, 40), (0, 4000)),
    (Line(lacks={"decode": 4}, refused=2), (0, 6), (0, 400)),
    (Line(prefill=6, decode=2, reserved=7, lacks={"prefill": 6, "decode": 4, "both": 2}), (14, 8), (1400, 800)),
    (Line(lacks={"router": 40}), (0, 0), (0, 0)),
    (Line(), (0, 0), (0, 0)),
]


def _series(line: Line) -> dict[str, float]:
    theirs = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="another"'
    seen: dict[str, float] = {f'tandem_queue_requests{{{theirs},lacks="prefill"}}': 1000}
    for router in range(_ROUTERS):
        at = f'{_OURS},pod="router-{router}"'
        seen[f"tandem_ready{{{at}}}"] = 1
        for role in ("prefill", "decode"):
            worker = f'{at},worker="{role}-0",role="{role}"'
            seen[f'tandem_worker_requests{{{worker},state="waiting"}}'] = getattr(line, role)
            seen[f'tandem_worker_requests{{{worker},state="running"}}'] = 99
            seen[f"tandem_worker_backlog_tokens{{{worker}}}"] = 100 * getattr(line, role)
        seen[f'tandem_worker_requests{{{at},worker="decode-0",role="decode",state="reserved"}}'] = line.reserved
        for lack in Shortage:
            count = line.lacks.get(lack.value, 0) / _ROUTERS
            seen[f'tandem_queue_requests{{{at},lacks="{lack.value}"}}'] = count
            seen[f'tandem_queue_tokens{{{at},lacks="{lack.value}"}}'] = 100 * count
        seen[f"tandem_refused_choices{{{at}}}"] = line.refused / _ROUTERS
    return seen


def _told(text: str) -> dict[str, float]:
    """A router's own metrics, as Prometheus stores them."""
    seen: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            seen[f"{sample.name}{{{_OURS}{labels and ','}{labels}}}"] = sample.value
    return {name: value for name, value in seen.items() if name.startswith(_SIGNALS)}


def _expected(name: str, figures: tuple[float, float]) -> dict[str, Any]:
    samples = [
        {"labels": f'{name}{{namespace="{NAMESPACE}", pool="{pool}", release="{RELEASE}"}}', "value": value}
        for pool, value in zip(("prefill", "decode"), figures, strict=True)
    ]
    return {"expr": name, "eval_time": "30s", "exp_samples": samples}


def _promtool(*arguments: str) -> None:
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.fail("no promtool: it is in Debian's package prometheus; or say where it is with PROMTOOL=/path")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


def _case(seen: Mapping[str, float], requests: tuple[float, float], tokens: tuple[float, float]) -> dict[str, Any]:
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value}x4"} for name, value in seen.items()],
        "promql_expr_test": [
            _expected("tandem_pool_waiting_requests", requests),
            _expected("tandem_pool_waiting_tokens", tokens),
        ],
    }


def _check(tmp_path: Path, cases: Sequence[dict[str, Any]]) -> None:
    rules, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    rules.write_text(yaml.safe_dump(render(GOOD["hpa"]).named("PrometheusRule", "-scaling")["spec"]))
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": list(cases)}))
    _promtool("check", "rules", str(rules))
    _promtool("test", "rules", str(tests))


def test_scaling_signals_cover_each_pools_own_queue(tmp_path: Path) -> None:
    _check(tmp_path, [_case(_series(line), requests, tokens) for line, requests, tokens in CASES])


def test_scaling_signals_without_routers_are_absent_rather_than_zero(tmp_path: Path) -> None:
    unseen = {name: value for name, value in _series(Line()).items() if _OURS not in name}
    silent = [{"expr": name, "eval_time": "30s", "exp_samples": []} for name in SIGNALS]
    _check(tmp_path, [_case(unseen, (0, 0), (0, 0)) | {"promql_expr_test": silent}])


class Work(NamedTuple):
    """The pool use of one worker."""

    worker: str
    busy: float = 0
    """Share of its time, in steps of both kinds."""
    used: float = 0
    """Of a thousand blocks."""
    running: float = 0


def _worked(*workers: Work) -> dict[str, tuple[float, float]]:
    """Series, each with its start value and its increase per quarter of a minute."""
    seen: dict[str, tuple[float, float]] = {}
    for router in range(_ROUTERS):
        for name, busy, used, running in workers:
            labels = f'{_OURS},pod="router-{router}",worker="{name}",role="{name.split("-")[0]}"'
            for kind in ("prefill", "decode"):
                seen[f'tandem_worker_step_seconds_total{{{labels},kind="{kind}"}}'] = (0, 15 * busy / 2)
            for state, blocks in (("used", used), ("free", 1000 - used), ("quarantined", 0)):
                seen[f'tandem_worker_kv_blocks{{{labels},state="{state}"}}'] = (blocks, 0)
            seen[f'tandem_worker_requests{{{labels},state="running"}}'] = (running, 0)
    return seen


@pytest.mark.parametrize(
    ("workers", "use"),
    [
        # A pool in full use keeps its size, however long the queue is: this signal never makes a pool grow.
        ((Work("prefill-0", busy=1), Work("prefill-1", busy=0.5), Work("decode-0", used=990)), (1, 1)),
        # What wants half of two workers is carried by less of them; an idle one counts.
        ((Work("prefill-0", busy=0.6), Work("prefill-1"), Work("decode-0", used=300), Work("decode-1")), (0.4, 0.2)),
        # A decode worker whose sequences are short is full when it has no places.
        ((Work("prefill-0", busy=0.3), Work("decode-0", used=60, running=96), Work("decode-1", used=150)), (0.4, 0.35)),
    ],
)
def test_pool_use_signal_reflects_load(workers: Sequence[Work], use: tuple[float, float], tmp_path: Path) -> None:
    series = [{"series": name, "values": f"{start}+{step}x40"} for name, (start, step) in _worked(*workers).items()]
    query = {**_expected("", use), "expr": "round(tandem_pool_use, 0.001)", "eval_time": "10m"}
    _check(tmp_path, [{"interval": "15s", "input_series": series, "promql_expr_test": [query]}])


@pytest.mark.parametrize("bottleneck", ["prefill", "decode"])
def test_scaling_signals_of_overloaded_pool_leave_other_pool(bottleneck: Bottleneck, tmp_path: Path) -> None:
    """Production's admission and schedulers on a virtual clock; the rules read what its router shows."""
    shown: list[str] = []
    run_until_queue(bottleneck, lambda simulation: shown.append(exposition(simulation)))
    seen = _told(shown[0])

    def queried(metric: str, **labels: str) -> float:
        """A sum over the exposed metrics, without the rules."""
        parts = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(value for name, value in seen.items() if name.startswith(metric) and all(p in name for p in parts))

    requests, tokens = {}, {}
    for role in ("prefill", "decode"):
        queued = [queried(f"tandem_queue_{what}") if role == bottleneck else 0.0 for what in ("requests", "tokens")]
        requests[role] = queued[0] + queried("tandem_worker_requests", role=role, state="waiting")
        tokens[role] = queued[1] + queried("tandem_worker_backlog_tokens", role=role)
    _check(
        tmp_path,
        [_case(seen, (requests["prefill"], requests["decode"]), (tokens["prefill"], tokens["decode"]))],
    )
    # What the other pool is about to do is no more than it does at once.
    values = yaml.safe_load((CHART / "values.yaml").read_text())["prefill"]["autoscaling"]
    most = {
        role: max(requests[role] / values["waitingRequests"], tokens[role] / values["waitingTokens"])
        for role in requests
    }
    assert {role for role in most if most[role] > 4.0} == {bottleneck}
    assert requests[bottleneck] >= QUEUE
