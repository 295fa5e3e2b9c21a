"""The planner's loop over a real HTTP router and a fake scaler: observations, orders, errors, output, metrics."""

import asyncio
import http.server
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.autoscaler.command import address_of, sizes_of
from cluster.autoscaler.live import LiveOptions, LivePlanner, autoscale_live
from cluster.autoscaler.routers import RouterGroup
from cluster.cli.main import app
from cluster.planner.load_watch import LoadWatch, Unseen
from cluster.planner.orders import Order, OrderFailed
from cluster.planner.speed import SpeedWatch
from cluster.planner.values import FleetView, Observation, Sizes
from tandem.errors import ConfigError
from tests.support.cluster.planned_worker import TARGETS, WORKER
from tests.support.cluster.router_figures import POLICY, RouterCounters
from tests.support.http_server import answering

# On a busy machine looks come late, and a hold would begin anew with each.
QUICK = replace(POLICY, start_s=0.1, hold_s=0.0, flip_hold_s=0.0, cooldown_s=0.0, most_workers=3)
SHAPE = Sizes(prefill=1, decode=2)
# Answers take one decode worker, however often looks come: it is prompts that lack one.
BUSY = {"worker": replace(WORKER, kv_tokens=10**9, max_running=10**6), "targets": replace(TARGETS, itl_s=100.0)}


@dataclass
class MetricsServer:
    """A router's `/metrics`. Each look is preceded by the load of `serve`."""

    router: RouterCounters = field(default_factory=RouterCounters)
    num: int = 0
    key: str | None = None
    status: int = 200
    hosts: set[str] = field(default_factory=set)
    url: str = ""

    def text(self, headers: Any) -> tuple[int, str]:
        self.hosts.add(headers["Host"])
        if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, "who are you"
        self.router.serve(self.num, prompt=6000, output=1)
        return self.status, self.router.text()


@contextmanager
def metrics_server(**settings: Any) -> Iterator[MetricsServer]:
    state = MetricsServer(**settings)
    state.router.metrics.workers("prefill", "live", 1)
    state.router.metrics.workers("decode", "live", 2)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = state.text(self.headers) if self.path == "/metrics" else (404, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Write no access log to standard error."""

    with answering(Handler) as state.url:
        yield state


@dataclass
class Workers:
    """A fleet that obeys."""

    can_flip = True
    sizes: Sizes = SHAPE
    orders: list[Order] = field(default_factory=list)
    refusal: str | None = None
    silence: str | None = None

    async def fleet(self) -> FleetView:
        if self.silence is not None:
            raise OrderFailed(self.silence)
        return FleetView(sizes=self.sizes, starting=Sizes(prefill=0, decode=1))

    async def carry_out(self, order: Order) -> None:
        self.orders.append(order)
        if self.refusal is not None:
            raise OrderFailed(self.refusal)
        self.sizes = order.after


def options(url: str, **changes: Any) -> LiveOptions:
    plain = LiveOptions(urls=[url], policy=QUICK, period_s=0.05, as_json=True, **BUSY)
    return replace(plain, **changes)


async def run_until(planner: LivePlanner, lines: list[str], awaited: str) -> None:
    """Run until a line contains this."""
    stop = asyncio.Event()
    running = asyncio.create_task(planner.run(stop))
    async with asyncio.timeout(60.0):
        while not any(awaited in line for line in lines) and not running.done():  # noqa: ASYNC110 - lines are no event
            await asyncio.sleep(0.01)
    stop.set()
    await running


def lines(printed: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed]


async def test_planner_long_prompts_flip_a_decode_worker() -> None:
    printed: list[str] = []
    workers = Workers()
    with metrics_server(num=2) as router:
        planner = LivePlanner(options(router.url), workers, printed.append)
        await run_until(planner, printed, '"done"')
    reports = lines(printed)
    assert reports[0]["outcome"] == "unseen"
    assert [str(order.after) for order in workers.orders] == ["2:1"]
    [ordered] = [line for line in reports if line["outcome"] == "ordered"]
    assert ordered["actions"] == ["flip decode -> prefill"]
    assert ordered["order"] == {"prefill": 2, "decode": 1}
    assert ordered["starting"] == {"prefill": 0, "decode": 1}
    sample = planner.metrics.registry.get_sample_value
    assert sample("tandem_planner_actions_total", {"kind": "flip", "pool": "prefill"}) == 1.0
    assert sample("tandem_planner_orders_total", {"outcome": "done"}) == 1.0
    assert sample("tandem_planner_wanted_workers", {"pool": "prefill"}) == 2.0
    assert sample("tandem_planner_requests_per_second") > 0.0


async def test_planner_dry_run_takes_fleet_from_routers_and_changes_nothing() -> None:
    printed: list[str] = []
    with metrics_server(num=2) as router:
        await run_until(LivePlanner(options(router.url, is_dry_run=True), None, printed.append), printed, "would_order")
    report = lines(printed)[-1]
    assert report["sizes"] == {"prefill": 1, "decode": 2}
    assert report["actions"] == ["flip decode -> prefill"]
    with pytest.raises(ConfigError, match="--dry-run"):
        LivePlanner(options(router.url), None, printed.append)


async def test_planner_failed_order_is_reported_and_retried() -> None:
    printed: list[str] = []
    workers = Workers(refusal="no room")
    with metrics_server(num=2) as router:
        await run_until(LivePlanner(options(router.url), workers, printed.append), printed, '"waiting"')
    failures = [line for line in lines(printed) if line["outcome"] == "failed"]
    assert len(failures) == len(workers.orders)
    assert all("no room" in line["why"][0] for line in failures)
    assert workers.sizes == SHAPE


async def test_planner_survives_sighup_and_ends_on_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _frame: reached.append(number))
    monkeypatch.setattr("tandem.process.hangup.has_terminal", lambda: False)
    printed: list[str] = []

    def on_line(line: str) -> None:
        printed.append(line)
        os.kill(os.getpid(), signal.SIGTERM if len(printed) > 2 else signal.SIGHUP)

    try:
        with metrics_server() as router:
            assert await autoscale_live(options(router.url, is_dry_run=True), None, on_line) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert reached == []
    assert len(printed) >= 3


async def test_planner_unexpected_scaler_error_is_fatal() -> None:
    class Broken(Workers):
        async def carry_out(self, order: Order) -> None:
            raise ZeroDivisionError

    with metrics_server(num=2) as router, pytest.raises(ZeroDivisionError):
        await LivePlanner(options(router.url, turns=200), Broken(), lambda _: None).run(asyncio.Event())


async def test_planner_silent_fleet_or_router_is_named_and_gives_no_order() -> None:
    printed: list[str] = []
    workers = Workers(silence="the socket is gone")
    with metrics_server(num=2) as router:
        await run_until(LivePlanner(options(router.url, turns=5), workers, printed.append), printed, "never")
        router.status = 503
        await run_until(LivePlanner(options(router.url, turns=2), Workers(), printed.append), printed, "never")
        dead = LivePlanner(options("http://127.0.0.1:1", turns=2), Workers(), printed.append)
        await run_until(dead, printed, "never")
    reports = lines(printed)
    assert {line["outcome"] for line in reports[1:5]} == {"unknown"}
    assert "the socket is gone" in reports[1]["why"][0]
    assert "HTTP 503" in reports[5]["why"][0]
    assert "ConnectError" in reports[7]["why"][0]
    assert workers.orders == []


async def test_planner_rereads_key_and_reports_refused_one(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old\n")
    with metrics_server(key="new") as router:
        async with RouterGroup([router.url], api_key_file=key, tls=None) as routers:
            assert "--api-key-file" in str((await routers.scrape())[router.url])
            key.write_text("new\n")
            assert not isinstance((await routers.scrape())[router.url], str)


async def test_planner_slow_router_times_out_without_delaying_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.autoscaler.routers._WHOLE_S", 0.2)

    hung_up = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n# ")
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(b"x")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.01)
        writer.transport.abort()
        hung_up.set()

    slow = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    async with slow:
        with metrics_server() as router:
            async with RouterGroup([url, router.url], api_key_file=None, tls=None) as routers:
                answers = await routers.scrape()
        await asyncio.wait_for(hung_up.wait(), 20)
    assert "longer than 0.2 s" in str(answers[url])
    assert not isinstance(answers[router.url], str)


@pytest.mark.parametrize("text", ["hush\nhush", "hush\u00e9"])
async def test_planner_malformed_key_is_reported_without_its_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    async with RouterGroup(["http://127.0.0.1:1"], api_key_file=tmp_path / "key", tls=None) as routers:
        [problem] = (await routers.scrape()).values()
    assert "is not a key" in str(problem)
    assert "hush" not in str(problem)


async def test_planner_router_name_resolves_to_all_addresses() -> None:
    with metrics_server() as router:
        port = router.url.rpartition(":")[2]
        async with RouterGroup([f"http://localhost:{port}/v1"], api_key_file=None, tls=None) as routers:
            [(name, figures)] = (await routers.scrape()).items()
        assert name == router.url
        assert not isinstance(figures, str)
        assert router.hosts == {f"localhost:{port}"}
        async with RouterGroup(["no-such-host.invalid"], api_key_file=None, tls=None) as routers:
            [figures] = (await routers.scrape()).values()
        assert "cannot resolve its name" in str(figures)


async def test_planner_failed_name_lookup_skips_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LoadWatch(SpeedWatch(WORKER), ttft_s=TARGETS.ttft_s, forget_s=60.0)
    with metrics_server(num=5) as router:
        url = router.url.replace("127.0.0.1", "localhost")
        async with RouterGroup([url], api_key_file=None, tls=None) as routers:
            assert isinstance(watch.observe(0.0, await routers.scrape()), Unseen)

            async def fails(*_: object, **__: object) -> None:
                raise socket.gaierror("no answer")

            with monkeypatch.context() as without_names:
                without_names.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
                first = await routers.scrape()
            for at_s, answers in ((15.0, first), (30.0, await routers.scrape())):
                seen = watch.observe(at_s, answers)
                assert isinstance(seen, Observation)
                assert (seen.period_s, seen.demand.num_requests) == (15.0, 5)


async def test_planner_text_output_reports_each_change_once() -> None:
    printed: list[str] = []
    with metrics_server(num=2) as router:
        planner = LivePlanner(options(router.url, as_json=False), Workers(refusal="no \x1b[31mroom"), printed.append)
        await run_until(planner, printed, "no action yet")
    assert [line for line in printed if "no action yet" in line] == printed[-1:]
    assert any("1:2 ordered: flip decode -> prefill" in line for line in printed)
    assert not any("\x1b" in line for line in printed)


def test_autoscale_sizes_and_addresses_parse_or_are_refused() -> None:
    assert sizes_of("1:12") == Sizes(prefill=1, decode=12)
    assert address_of("9100") == ("127.0.0.1", 9100)
    assert address_of("[::]:9100") == ("::", 9100)
    for text in ("", "1", "1:", ":1", "1:x", "1:2:3", "-1:2"):
        with pytest.raises(ConfigError, match="PREFILL:DECODE"):
            sizes_of(text)
    for text in ("", "x", "host:", "host:0", "70000"):
        with pytest.raises(ConfigError, match="PORT"):
            address_of(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://elsewhere:8000"], "--socket"),
        (["--socket", "s", "--kubernetes", "k"], "not both"),
        (["--dry-run", "--url", "ftp://x"], "not a router URL"),
        (["--generate", "rate=1,requests=2"], "--dry-run"),
        (["--least", "0:1", "--dry-run"], "must be at least 1"),
    ],
)
def test_autoscale_invalid_options_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["autoscale", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
