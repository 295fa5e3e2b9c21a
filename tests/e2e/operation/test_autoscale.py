"""A planner sizes a running cluster under load: real processes and its own control socket."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from cluster.autoscaler.live import LiveOptions, LivePlanner
from cluster.autoscaler.local_scaler import ControlScaler
from cluster.control.server import ControlSocket
from cluster.planner.staffing import LatencyTargets, WorkerModel
from cluster.planner.values import PlannerPolicy, Sizes
from cluster.simulator.inputs.latency_files import load_latency
from cluster.simulator.studies.worker_models import worker_with
from tests.support.e2e.emitted import emitted_labels as metric_samples
from tests.support.e2e.emitted import is_of_planner, unknown
from tests.support.monitoring_files import UsedExpression, expressions
from tests.support.promql import named
from tests.support.running_cluster import WAIT_S, RunningCluster, running

PROMPT_TOKENS, CLIENTS = 600, 3
AS_IT_WAS, AS_IT_SHOULD_BE = Sizes(prefill=1, decode=2), Sizes(prefill=2, decode=1)
# Flips need no watched time: on a busy machine looks come late, and it would begin anew with each. Nobody is given up.
POLICY = PlannerPolicy(
    most_workers=AS_IT_WAS.total, start_s=1.0, hold_s=600.0, flip_hold_s=0.0, cooldown_s=0.0, most_flips=1
)


def worker() -> WorkerModel:
    """Another machine's profile: the planner measures this one's speed by itself."""
    return worker_with(load_latency("small-gpu"), chunk_tokens=1024, kv_tokens=45_000, max_running=64)


class Clients:
    """A number of clients in a closed loop; prompts are long, answers short, none repeats."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self.num_answers = 0
        self.enough = False

    async def ask(self, number: int) -> None:
        while not self.enough:
            salt = self.num_answers * CLIENTS + number
            prompt = [5 + (7919 * salt + 31 * position) % 900 for position in range(PROMPT_TOKENS)]
            assert len(await self._cluster.tokens(prompt, 4)) == 4
            self.num_answers += 1


@pytest.mark.turn(1)
async def test_planner_under_load_flips_a_worker_without_failing_requests(fork_servers, tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    overrides = {
        "command": fork_servers.command,
        "prefill__replicas": AS_IT_WAS.prefill,
        "decode__replicas": AS_IT_WAS.decode,
        "control_socket": str(tmp_path / "control" / "c.sock"),
    }
    async with (
        running(**overrides) as cluster,
        ControlSocket(cluster.local, report=cluster.logs.lines.append) as control,
    ):
        options = LiveOptions(
            urls=[cluster.local.http_url],
            worker=worker(),
            # A request that must wait at all is late, so prompts need a second worker; tokens may take their time.
            targets=LatencyTargets(ttft_s=0.05, itl_s=2.0),
            policy=POLICY,
            period_s=0.5,
            as_json=True,
        )
        dry, live, stop = replace(options, is_dry_run=True, turns=6), ControlScaler(control.path), asyncio.Event()
        clients = Clients(cluster)
        async with asyncio.timeout(3 * WAIT_S), asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(clients.ask(number))
            # A dry run says it, and leaves everything as it is.
            await LivePlanner(dry, live, lambda line: reports.append(json.loads(line))).run(stop)
            assert (await live.fleet()).sizes == AS_IT_WAS
            assert reports[-1]["actions"] == ["flip decode -> prefill"], reports
            reports.clear()
            planner = LivePlanner(options, live, lambda line: reports.append(json.loads(line)))
            planning = group.create_task(planner.run(stop))
            await cluster.until(lambda: _has(reports, "done"))
            assert (await live.fleet()).sizes == AS_IT_SHOULD_BE
            after = clients.num_answers
            # And stays: both read prompts, and the planner is content.
            await cluster.until(lambda: _both_read(cluster))
            await cluster.until(lambda: _answered(clients, after + 3 * CLIENTS))
            stop.set()
            await planning
            clients.enough = True
        assert [line["outcome"] for line in reports].count("ordered") == 1
        assert not [line for line in reports if line["outcome"] in ("failed", "others")]
        assert await cluster.figure("tandem_request_failures_total") == 0
        assert_dashboards_and_alerts_use_exported_metrics(planner, (await cluster.http.get("/metrics")).text)


def assert_dashboards_and_alerts_use_exported_metrics(planner: LivePlanner, by_router: str) -> None:
    """Dashboards and alerts use metrics that exist, and every planner metric is on a dashboard."""
    by_planner = generate_latest(planner.metrics.registry).decode()
    exposition = by_router + by_planner
    used = [one for one in expressions() if is_of_planner(one)]
    assert unknown(used, exposition) == []
    on_a_board = {
        selector.name for one in used if one.where.startswith("planner: ") for selector in named(one.expr).selectors
    }
    assert on_a_board >= {name for name in metric_samples(by_planner) if not name.endswith("_created")}
    assert len(unknown([UsedExpression("x", 'tandem_planner_orders_total{outcome="late"}')], exposition)) == 1


async def _has(reports: list[dict[str, Any]], outcome: str) -> bool:
    return any(line["outcome"] == outcome for line in reports)


async def _answered(clients: Clients, count: int) -> bool:
    return clients.num_answers >= count


async def _both_read(cluster: RunningCluster) -> bool:
    steps = await cluster.figures("tandem_worker_steps_total", role="prefill", kind="prefill")
    return len(steps) == AS_IT_SHOULD_BE.prefill and all(steps.values())
