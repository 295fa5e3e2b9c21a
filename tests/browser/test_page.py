"""The status page in a real browser, over a real cluster under load."""

import asyncio
import re
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.browser.watched_page import DESK, PHONE, tab
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="package")
STORY = "Once upon a time there was a little fox named Lily. " * 8
PNG = b"\x89PNG\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def cluster():
    async with running(decode__replicas=2, transfer__succession_s=0.1) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def busy(cluster):
    """Clients that send requests through both pools for as long as the tests run."""

    async def client(number):
        turn = 0
        while True:
            prompt = [*range(300, 620), 700 + number, 720 + turn % 50]
            await cluster.stream(prompt, 24)
            turn += 1

    clients = [asyncio.ensure_future(client(number)) for number in range(2)]
    yield cluster
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def test_playground_question_is_answered_and_timed(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        await seen.is_live()
        await seen.ask(f"{STORY}What did Lily do?")
        page = seen.page
        await expect(page.locator("#ask-state")).to_contain_text("Done: ")
        answer = await page.locator("#answer").inner_text()
        phases = await page.locator(".phases li").all_inner_texts()
        assert [phase.split("\n")[0] for phase in phases] == ["Queue", "Prefill", "KV transfer", "Decode"]
        assert all(re.search(r"\d (ms|s)$", phase) for phase in phases)
        assert await page.locator(".track > div:visible").count() >= 2
        settings = {"model": "tandem-tiny", "temperature": 0, "max_tokens": 96}
        messages = [{"role": "user", "content": f"{STORY}What did Lily do?"}]
        response = await busy.http.post("/v1/chat/completions", json={**settings, "messages": messages})
        assert answer.strip() == response.json()["choices"][0]["message"]["content"].strip() != ""
        assert seen.messages == []


async def test_playground_answer_can_be_stopped(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        await seen.is_live()
        page = seen.page
        await page.fill("#max-tokens", "1500")
        await page.fill("#prompt", "Tell me a long story about a fox, an owl and a kite.")
        await page.locator("#prompt").press("Control+Enter")
        await expect(page.locator("#send")).to_be_disabled()
        await page.evaluate("document.getElementById('stop').click()")
        await expect(page.locator("#ask-state")).to_have_text(re.compile("Stopped|Done"))
        await expect(page.locator("#send")).to_be_enabled()


async def test_page_shows_the_cluster(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        page = seen.page
        await seen.is_live()
        for name in ("prefill-0", "decode-0", "decode-1"):
            await expect(page.locator(".worker", has_text=name)).to_contain_text("live")
        await expect(page.locator("#model")).to_have_text("tandem-tiny")
        await expect(page.locator("#tiles .tile").first).to_contain_text(
            re.compile(r"Generation last 10 s[1-9][\d.,]*k?tokens/s")
        )
        await expect(page.locator("#decision-list .decision").first).to_contain_text("tokens to")
        await expect(page.locator("#prefix-list .prefix").first).to_contain_text(
            re.compile(r"[0-9a-f]{16}.*\d+ requests")
        )
        assert "300, 301" not in await page.content()
        # A whole step of five seconds must have passed for a curve to begin.
        await expect(page.locator("#chart-rate .line")).not_to_have_count(2)
        await expect(page.locator("#chart-rate .plot path.line, #chart-rate .plot circle").first).to_be_visible()


async def test_charts_are_readable_with_pointer_and_keyboard(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        page = seen.page
        await seen.is_live()
        await expect(page.locator("#chart-ttft .nothing")).to_have_count(0)
        await page.locator("#chart-ttft .plot").hover(position={"x": 300, "y": 80})
        await expect(page.locator("#chart-ttft .tip")).to_contain_text("ago")
        await page.locator("#chart-ttft").focus()
        await page.keyboard.press("End")
        await expect(page.locator("#chart-ttft [aria-live]")).to_have_text(re.compile(r"s ago, "))
        await page.keyboard.press("Escape")
        await expect(page.locator("#chart-ttft .tip")).to_be_hidden()


@pytest.mark.parametrize("width", [390, 721, 1024, 1181, 1440, 1920])
async def test_tiles_hold_the_largest_figures_at_every_width(browser, cluster, width):
    async with tab(browser, (width, 900)) as seen:
        await seen.open(cluster.local.http_url)
        await seen.is_live()
        figures = [("999.9k", "tokens/s"), ("100,000", "requests"), ("99.99", "s p50")] * 2
        assert await seen.page.locator(".tile .figure").count() == len(figures)
        assert await seen.overflowing(figures) == []


async def test_tiles_and_charts_name_their_window(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        await seen.is_live()
        tiles = [words.split("\n") for words in await seen.page.locator("#tiles dt").all_inner_texts()]
        assert [tile[-1].strip() for tile in tiles] == ["last 10 s"] * 2 + ["now"] + ["last minute"] * 2 + ["now"]
        charts = await seen.page.locator(".chart h3").all_inner_texts()
        assert len(charts) == 3
        assert all(chart.endswith("last 5 min") for chart in charts)


async def test_worker_metric_tables_have_equal_rows(browser, busy):
    async with tab(browser) as seen:
        await seen.open(busy.local.http_url)
        await seen.is_live()
        tables = seen.page.locator(".pool[data-role=decode] .worker table")
        await expect(tables).to_have_count(2)
        first, second = [await tables.nth(i).locator("th").all_inner_texts() for i in range(2)]
        assert first[:8] == second[:8] == [
            "Running", "Waiting", "Backlog", "Cached", "Step", "KV link", "Sending", "Receiving"
        ]  # fmt: skip
        await expect(tables.first.locator("td")).not_to_have_count(0)


async def test_playground_on_phone_precedes_decisions(browser, cluster):
    async with tab(browser, PHONE) as seen:
        await seen.open(cluster.local.http_url)
        await seen.is_live()
        tops = {
            name: await seen.page.locator(name).evaluate("element => element.getBoundingClientRect().top")
            for name in ("#workers", "#playground", "#decisions")
        }
        assert tops["#workers"] < tops["#playground"] < tops["#decisions"]
        await expect(seen.page.get_by_label("Max tokens")).to_have_value("96")


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(DESK, "light", marks=pytest.mark.turn(0)),
        pytest.param(PHONE, "dark", marks=pytest.mark.turn(1)),
        pytest.param(DESK, "dark", marks=pytest.mark.slow),
        pytest.param(PHONE, "light", marks=pytest.mark.slow),
    ],
)
async def test_page_passes_accessibility_rules(browser, busy, size, scheme, tmp_path: Path):
    async with tab(browser, size, scheme) as seen:
        await seen.open(busy.local.http_url)
        await seen.is_live()
        await seen.ask("Hello")
        await expect(seen.page.locator("#ask-state")).to_contain_text("Done: ")
        assert await seen.violations() == []
        assert await seen.fits()
        assert await seen.overflowing() == []
        picture = await seen.page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert picture.startswith(PNG)


async def test_page_theme_is_selectable_and_persistent(browser, cluster):
    async with tab(browser, scheme="light") as seen:
        await seen.open(cluster.local.http_url)
        await seen.is_live()
        page = seen.page

        async def ground() -> str:
            return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))

        light = await ground()
        await page.get_by_label("Dark").check()
        dark = await ground()
        assert light != dark
        await page.reload()
        assert await ground() == dark
        await page.get_by_label("Auto").check()
        assert await ground() == light


@pytest.mark.slow
async def test_page_reports_killed_router_and_reconnects(browser, cluster):
    async with tab(browser) as seen:
        await seen.open(cluster.local.http_url)
        await seen.is_live()
        page, pid = seen.page, cluster.pid("router")
        cluster.local.kill("router", signal.SIGKILL)
        await expect(page.locator("#lost")).to_contain_text("No status: no connection. Last update: ")
        await expect(page.locator("#link")).to_have_text("Disconnected")
        await cluster.local.wait_ready("router", after_pid=pid)
        await seen.is_live()
        await expect(page.locator("#lost")).to_be_hidden()
