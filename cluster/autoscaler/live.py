"""`tandem autoscale` against a running cluster: observes it once per period and carries out the planner's decisions.

This module only passes facts to `cluster.planner.controller` and its orders to a scaler. Observation continues while an
order is carried out. Stopping the planner changes nothing: the fleet stays as it is.
"""

import asyncio
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import start_http_server

from cluster.autoscaler.report import PlannerMetrics, RoundReporter
from cluster.autoscaler.routers import RouterGroup
from cluster.planner.controller import Controller, Outcome
from cluster.planner.load_watch import LoadWatch, live_workers
from cluster.planner.orders import Order, OrderFailed, Scaler
from cluster.planner.planner import Planner
from cluster.planner.router_figures import RouterFigures
from cluster.planner.speed import SpeedWatch
from cluster.planner.staffing import LatencyTargets, Margins, Staffing, WorkerModel
from cluster.planner.values import FleetView, PlannerPolicy
from tandem.errors import ConfigError
from tandem.process.hangup import on_hangup

_FORGET_PERIODS = 4.0
"""Periods to wait for a silent router; after that its clients are assumed to use the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Options of the planner of a live cluster."""

    urls: Sequence[str]
    worker: WorkerModel
    targets: LatencyTargets
    policy: PlannerPolicy
    period_s: float = 15.0
    margins: Margins = field(default_factory=Margins)
    is_dry_run: bool = False
    as_json: bool = False
    api_key_file: Path | None = None
    tls: ssl.SSLContext | None = None
    metrics_address: tuple[str, int] | None = None
    turns: int | None = None
    """Number of rounds to run; None: no limit."""


class LivePlanner:
    def __init__(self, options: LiveOptions, scaler: Scaler | None, say: Callable[[str], None]) -> None:
        """`scaler`: None to take the fleet from the routers' figures, and never change it. Raises ConfigError."""
        if scaler is None and not options.is_dry_run:
            raise ConfigError("changing a fleet needs --socket PATH or --kubernetes NAME; --dry-run changes nothing")
        self._options = options
        self._scaler = scaler
        self._routers = RouterGroup(options.urls, api_key_file=options.api_key_file, tls=options.tls)
        self.metrics = PlannerMetrics(period_s=options.period_s)
        self._account = RoundReporter(say, self.metrics, as_json=options.as_json)
        self._speed = SpeedWatch(options.worker)
        self._watch = LoadWatch(self._speed, ttft_s=options.targets.ttft_s, forget_s=_FORGET_PERIODS * options.period_s)
        self._staffing = Staffing(options.worker, options.targets, options.margins)
        planner = Planner(self._staffing, options.policy, period_s=options.period_s)
        retry_s = max(options.period_s, options.policy.cooldown_s)
        self._controller = Controller(planner, is_dry_run=options.is_dry_run, retry_s=retry_s)
        self._order: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or the rounds are used up. An order in progress is left to the scaler's target."""
        options, loop, left = self._options, asyncio.get_running_loop(), self._options.turns
        async with self._routers as routers:
            due_s = loop.time()
            try:
                while not stop.is_set() and left != 0:
                    await self._turn(routers)
                    left = None if left is None else left - 1
                    # After a late round, wait at least some time before the next: a very short period would show
                    # nothing.
                    due_s = max(due_s + options.period_s, loop.time() + options.period_s / 2)
                    try:
                        async with asyncio.timeout_at(due_s):
                            await stop.wait()
                    except TimeoutError:
                        continue
            finally:
                if self._order is not None:
                    self._order.cancel()
                    await asyncio.wait([self._order])

    async def _turn(self, routers: RouterGroup) -> None:
        if self._order is not None and self._order.done():
            self._order.result()  # raises what a scaler must not raise, so that the planner ends instead of hiding it
        answers = await routers.scrape()
        fleet = await self._fleet(answers)
        now_s = asyncio.get_running_loop().time()
        seen = self._watch.observe(now_s, answers)
        self._staffing.worker = self._speed.decode_worker
        turn = self._controller.turn(now_s, seen, fleet)
        self._account.turn(turn)
        if turn.outcome is Outcome.ORDERED and turn.order is not None:
            self._order = asyncio.create_task(self._carry_out(turn.order))

    async def _fleet(self, answers: dict[str, RouterFigures | str]) -> FleetView | str:
        if self._scaler is None:
            answered = [answer for answer in answers.values() if isinstance(answer, RouterFigures)]
            return FleetView(sizes=live_workers(answered)) if answered else "no router answers"
        try:
            return await self._scaler.fleet()
        except OrderFailed as error:
            return str(error)

    async def _carry_out(self, order: Order) -> None:
        assert self._scaler is not None  # noqa: S101  # narrows: orders are given only with a scaler
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self._scaler.carry_out(order)
        except OrderFailed as error:
            self._controller.failed(loop.time())
            self._account.failed(str(error))
        else:
            self._controller.done()
            self._account.done(loop.time() - began_s, order.after)


async def autoscale_live(options: LiveOptions, scaler: Scaler | None, say: Callable[[str], None]) -> int:
    """Run the planner until SIGINT or SIGTERM, and return the exit code."""
    planner = LivePlanner(options, scaler, say)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
            stack.callback(loop.remove_signal_handler, signum)
        if on_hangup(loop, closed=stop.set, reread=lambda: None):  # keys and tokens are read again every period anyway
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
        if options.metrics_address is not None:
            host, port = options.metrics_address
            try:
                server, thread = start_http_server(port, host, registry=planner.metrics.registry)
            except OSError as error:
                raise ConfigError(f"--metrics {host}:{port}: {error.strerror or error}") from None
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
        await planner.run(stop)
    return 0
