"""`tandem top`: routers merged, workers sorted, and the command with and without a terminal."""

import asyncio
import os
import signal
import sys
import termios
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import orjson
import pytest
from pydantic import SecretStr
from rich.console import Console

from cluster.top.status import ClusterStatus, Rates, SortOrder, in_order, merge_statuses
from cluster.top.view import View
from router.http.app import OptionalRoutes, create_app
from router.http.server.http_server import HttpServer
from router.status.feed import StatusFeed
from router.types.worker_view import WorkerLoad
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tests.support.cluster.terminal import WAIT_S, terminal
from tests.support.router.servers import fakes
from tests.support.router.whole_router import NUM_BLOCKS, WholeRouter
from tests.support.router.whole_status import answer, feed_of, sources_of

ROOT = Path(__file__).resolve().parents[4]


async def status_of(whole: WholeRouter) -> ClusterStatus:
    return ClusterStatus.read(orjson.loads(await feed_of(whole).snapshot("a")))


@asynccontextmanager
async def served(config: RouterConfig | None = None, port: int = 0, whole: WholeRouter | None = None):
    """Serve the status of a whole router; yield the URL."""
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    async with StatusFeed(sources_of(whole or WholeRouter(1))) as feed:
        app = create_app(
            parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics, OptionalRoutes(status=feed)
        )
        async with HttpServer(app, host="127.0.0.1", port=port, grace_s=1.0) as running:
            yield f"http://127.0.0.1:{running.port}"
            feed.close()


def printed(view: View, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, height=24, highlight=False)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


async def run(*arguments: str) -> tuple[int, str, str]:
    """`tandem top` without a terminal."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli.main", "top", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_top_merges_routers_but_not_their_workers() -> None:
    whole = WholeRouter(1)
    one = await status_of(whole)
    busier = tuple(replace(worker, report=worker.report + 1, running=5) for worker in one.workers)
    rates = replace(one.rates, generation_tokens_per_s=10.0, moved_bytes_per_s=7.0, ttft_p95_ms=80.0)
    other = replace(one, running=2, queued=3, oldest_s=4.0, workers=busier, rates=rates, not_ready="no worker")
    both = merge_statuses([one, other])
    assert (both.running, both.queued, both.oldest_s, both.processes) == (2, 3, 4.0, 2)
    assert [worker.running for worker in both.workers] == [5] * 5
    assert (both.rates.generation_tokens_per_s, both.rates.moved_bytes_per_s, both.rates.ttft_p95_ms) == (10, 7, 80)
    assert merge_statuses([other, other]).rates.generation_tokens_per_s == 20.0
    assert merge_statuses([other, other]).rates.moved_bytes_per_s == 7.0
    assert both.not_ready == "no worker"
    assert merge_statuses([one]) == one


async def test_top_cached_share_is_weighted_by_tokens() -> None:
    one = await status_of(WholeRouter(1))

    def reading(tokens: float, share: float | None) -> ClusterStatus:
        rates: Rates = replace(one.rates, prompt_tokens_per_s=tokens, cached_share=share)
        return replace(one, rates=rates)

    assert merge_statuses([reading(30.0, 1.0), reading(10.0, 0.0), reading(99.0, None)]).rates.cached_share == 0.75
    assert merge_statuses([reading(0.0, None)]).rates.cached_share is None


async def test_top_sorts_workers_by_chosen_column() -> None:
    whole = WholeRouter(1, num_decode=11, num_prefill=0)
    for number, one in enumerate(whole.workers):
        load = WorkerLoad(num_running=number % 3, num_free_blocks=NUM_BLOCKS - number)
        whole.registry.load_changed(one.info.key, load)
    workers = (await status_of(whole)).workers
    assert [w.used_blocks for w in in_order(workers, SortOrder.KV, reverse=False)] == sorted(range(11), reverse=True)
    assert [w.running for w in in_order(workers, SortOrder.RUNNING, reverse=True)] == sorted(n % 3 for n in range(11))
    assert [one.value for one in SortOrder] == ["name", "KV use", "running", "waiting", "backlog"]
    order, seen = SortOrder.NAME, []
    for _ in SortOrder:
        seen.append(order)
        order = order.following()
    assert (seen, order) == (list(SortOrder), SortOrder.NAME)


async def test_top_prints_known_status_and_missing_data() -> None:
    whole = WholeRouter(1, num_decode=40, names=("[red]\x1b[2Jname[/red]",))
    feed = feed_of(whole)
    answer(whole, ttft_s=0.2, itl_s=0.01, tokens=51)
    status = ClusterStatus.read(orjson.loads(await feed.snapshot("a")))
    text = printed(View(status=status, num_routers=2), width=120)
    for expected in ("toy", "2 routers", "41 decode workers", "p0", "d39", "KV", "hand-offs", "0 in flight", "75%"):
        assert expected in text
    assert "[red]�[2Jname[/red]" in text
    assert "\x1b[2J" not in text
    assert "p50 –" in printed(View(status=await status_of(WholeRouter(2))))
    short = printed(View(status=status, interactive=True))
    assert "more" in short
    assert len(short.splitlines()) <= 24
    narrow = printed(View(status=await status_of(WholeRouter(3, names=("decode-10",)))), width=80)
    assert "…" not in narrow
    assert "decode-10" in narrow
    away = printed(View(status=status, errors=("no cluster answers at X",), age_s=3.0))
    assert "no cluster answers at X" in away
    assert "3.0 s old" in away
    assert "no status yet" in printed(View(status=None, errors=("gone",)))


async def test_top_once_prints_once_and_reports_no_answer(tmp_path: Path) -> None:
    keyed = RouterConfig(api_keys=(ApiKey(key=SecretStr("a-key"), tenant="a"),))
    async with served(keyed) as url:
        code, out, err = await run("--once", "--url", url)
        assert (code, out) == (1, "")
        assert "401: send an API key" in err
        file = tmp_path / "key"
        file.write_text("another-key\n")
        _, _, err = await run("--once", "--url", url, "--api-key-file", str(file))
        assert err == "error: 401: unknown API key (give the file of an API key with --api-key-file)\n"
        file.write_text("a-key\n")
        code, out, err = await run("--url", url, "--url", url, "--api-key-file", str(file))
        assert (code, err) == (0, "")
        assert "2 routers" in out
        assert "d0" in out
    code, out, err = await run("--once", "--url", url)
    assert (code, out) == (1, "")
    assert err == f"error: no cluster answers at {url}: start one with `tandem up`, or give its address with --url\n"


async def test_top_survives_router_restart() -> None:
    whole = WholeRouter(1)
    async with served(whole=whole) as url, terminal("top", "--url", url, "--interval", "0.2") as shown:
        before = termios.tcgetattr(shown.follower)[:4]
        await shown.shows("worker ↓")
        shown.press("s")
        await shown.shows("KV ↓")
        shown.press("r")
        await shown.shows("KV ↑")
        shown.press("\x1b[A")
        whole.registry.draining(whole.workers[0].info.key, "told to")
        whole.now_s += 1.0
        await shown.shows("draining")
        shown.press("q")
        await shown.ends(0)
        assert termios.tcgetattr(shown.follower)[:3] == before[:3]
    async with terminal("top", "--url", url, "--interval", "0.2") as shown:
        await shown.shows("no cluster answers at")
        await shown.shows("no status yet")
        async with served(port=int(url.rpartition(":")[2])):
            await shown.shows("3 decode workers")
        await shown.shows("the figures are")
        shown.process.send_signal(signal.SIGINT)
        await shown.ends(0)


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": {"name": 1}}', "3", "null"])
def test_top_malformed_status_is_refused(content: str) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        ClusterStatus.read(orjson.loads(content))
