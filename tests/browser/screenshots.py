"""`make screenshots`: the pictures in docs/use of the status page and of `tandem top`, of a cluster under a small load.

With `--folder DIR` they go there, with the page at the widths of a laptop and a phone beside them: look after a change.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from PIL import Image
from playwright.async_api import Page, async_playwright, expect
from rich.console import Console

from cluster.top.status import ClusterStatus
from cluster.top.view import View
from tests.browser.conftest import ARGUMENTS, chromium
from tests.browser.watched_page import tab
from tests.support.running_cluster import RunningCluster, running

DOCS = Path(__file__).parents[2] / "docs" / "use"
DESK, LAPTOP, PHONE, TERMINAL = (1440, 1280), (1024, 800), (390, 844), (1060, 600)
NUM_STEPS = 30
"""Of five seconds, that the charts are to show."""
NUM_CLIENTS = 3
_TOP_WIDTH = 84
_COLOURS = 128
_ANSWER_MS = 120_000


async def ask(cluster: RunningCluster, rng: random.Random) -> None:
    """Prompts of two kinds: some share a long beginning, some are their own; with pauses between them."""
    for turn in itertools.count():
        shared = list(range(300, 620)) if rng.random() < 0.5 else [rng.randrange(300, 900) for _ in range(320)]
        await cluster.stream([*shared, 700 + turn % 100, rng.randrange(300, 900)], rng.randrange(16, 96))
        await asyncio.sleep(rng.random())


@contextlib.asynccontextmanager
async def load(cluster: RunningCluster, rng: random.Random) -> AsyncIterator[None]:
    """Clients that ask for as long as it is entered."""
    clients = [asyncio.create_task(ask(cluster, rng)) for _ in range(NUM_CLIENTS)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def until_charts_are_filled(cluster: RunningCluster, num_steps: int) -> None:
    """Return when so many steps of the curves have figures."""
    while True:
        curves = (await cluster.http.get("/status/snapshot")).json()["curves"]
        if sum(value is not None for value in curves["ttft_p50_ms"]) >= num_steps:
            return
        await asyncio.sleep(1.0)


async def picture_of_page(page: Page, url: str, path: Path, *, whole: bool) -> None:
    await page.goto(url)
    await page.click("#send")
    await expect(page.locator("#ask-state")).to_contain_text("Done: ", timeout=_ANSWER_MS)
    await page.evaluate("window.scrollTo(0, 0)")
    await page.screenshot(path=path, full_page=whole)
    shrink(path)


def shrink(path: Path) -> None:
    """Few colours do for a page without photographs, in a third of the bytes."""
    Image.open(path).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


async def picture_of_top(page: Page, status: bytes, path: Path) -> None:
    """As a terminal shows it."""
    console = Console(record=True, width=_TOP_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(View(status=ClusterStatus.read(orjson.loads(status))))
    await page.set_content(f"<body style='margin:0'>{console.export_svg(title='tandem top')}</body>")
    await page.locator("svg.rich-terminal").screenshot(path=path)
    shrink(path)


async def take(folder: Path, *, num_steps: int, every_width: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running(decode__replicas=2))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        rng = random.Random(7)  # a load, no secret
        await stack.enter_async_context(load(cluster, rng))
        await until_charts_are_filled(cluster, num_steps)
        for name, size in {"page": DESK, "page-1024": LAPTOP, "page-390": PHONE}.items():
            if name == "page" or every_width:
                async with tab(browser, size) as seen:
                    await picture_of_page(seen.page, cluster.local.http_url, folder / f"{name}.png", whole=every_width)
        async with tab(browser, TERMINAL) as seen:
            await picture_of_top(seen.page, (await cluster.http.get("/status/snapshot")).content, folder / "top.png")
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.browser.screenshots", description=__doc__)
    parser.add_argument("--folder", type=Path, help="write there, and the page at every width")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of five seconds, that the charts are to show")
    options = parser.parse_args()
    asyncio.run(take(options.folder or DOCS, num_steps=options.steps, every_width=options.folder is not None))


if __name__ == "__main__":
    main()
