"""The status page under names and answers that hold markup, with API keys, and with a router that refuses requests."""

import http.server
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from playwright.async_api import expect
from pydantic import SecretStr

from router.http.app import OptionalRoutes, create_app
from router.http.server.http_server import HttpServer
from router.status.feed import StatusFeed
from router.types.worker_view import WorkerLoad
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tests.browser.watched_page import PHONE, tab
from tests.support.http_server import answering
from tests.support.router.servers import fakes
from tests.support.router.whole_router import WholeRouter
from tests.support.router.whole_status import sources_of

pytestmark = pytest.mark.asyncio(loop_scope="package")
MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
KEYED = RouterConfig(api_keys=(ApiKey(key=SecretStr("right-key"), tenant="a"),))


@dataclass
class Served:
    """A router's HTTP server in this process, with what it answers and the state that its page shows."""

    url: str
    whole: WholeRouter
    feed: StatusFeed
    parts: fakes.Servers


@asynccontextmanager
async def served(
    config: RouterConfig | None = None,
    *,
    most: int = 8,
    num_prefill: int = 2,
    names: tuple[str, ...] = (),
    port: int = 0,
) -> AsyncIterator[Served]:
    whole = WholeRouter(1, num_decode=2, num_prefill=num_prefill, names=names)
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    async with StatusFeed(replace(sources_of(whole), model=parts.frontend.model), most_listeners=most) as feed:
        app = create_app(
            parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics, OptionalRoutes(status=feed)
        )
        async with HttpServer(app, host="127.0.0.1", port=port, grace_s=1.0) as running:
            yield Served(f"http://127.0.0.1:{running.port}/", whole, feed, parts)
            feed.close()


async def test_page_markup_in_names_and_answers_stays_text(browser):
    async with served(RouterConfig(reasoning_parser="think"), names=(MARKUP,)) as router, tab(browser) as seen:
        router.parts.say(f"<think>see {MARKUP}</think>hello {MARKUP} world")
        await seen.open(router.url)
        await seen.is_live()
        page = seen.page
        await expect(page.locator(".worker .name").get_by_text(MARKUP)).to_be_visible()
        await seen.ask(MARKUP)
        await expect(page.locator("#answer .thought")).to_have_text(f"see {MARKUP}")
        await expect(page.locator("#answer")).to_have_text(f"see {MARKUP}hello {MARKUP} world")
        await expect(page.locator("#ask-state")).to_contain_text("Done")
        assert await page.title() == "Tandem · tiny"
        assert await page.locator("main script, main img").count() == 0
        assert seen.messages == []


async def test_page_policy_blocks_injected_markup(browser):
    """The second line of defence: markup that got in would still not run."""
    async with served() as router, tab(browser) as seen:
        await seen.open(router.url)
        await seen.is_live()
        refused = await seen.page.evaluate(
            "(markup) => { try { document.body.innerHTML = markup; return ''; } catch (error) { return error.name; } }",
            MARKUP,
        )
        assert refused == "TypeError"
        assert await seen.page.title() == "Tandem · tiny"


async def test_page_with_keys_prompts_for_a_key_and_hides_it(browser):
    async with served(KEYED) as router, tab(browser, PHONE) as seen:
        router.parts.say("hello world")
        requested_urls: list[str] = []
        seen.page.on("request", lambda request: requested_urls.append(request.url))
        await seen.open(router.url)
        page = seen.page
        await expect(page.locator("#key-dialog")).to_be_visible()
        assert await seen.violations() == []
        await page.fill("#key", "wrong-key")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_have_text("Unknown API key.")
        await page.fill("#key", "right-key")
        await page.keyboard.press("Enter")
        await seen.is_live()
        await expect(page.locator("#key-dialog")).to_be_hidden()
        await seen.ask("hello")
        await expect(page.locator("#answer")).to_have_text("hello world")
        assert router.parts.generator.requests[0].tenant == "a"
        kept = await page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert "right-key" not in kept + "".join(requested_urls)
        assert not any("?" in url for url in requested_urls)


async def test_page_without_workers_explains_itself(browser):
    async with served(num_prefill=0) as router, tab(browser) as seen:
        router.whole.readiness.drain()
        await seen.open(router.url)
        await seen.is_live()
        page = seen.page
        await expect(page.locator("#pools")).to_contain_text("decode workers compute prompts themselves")
        await expect(page.locator("#not-ready")).to_have_text("Not ready: the router is draining.")
        await expect(page.locator("#chart-ttft")).to_contain_text("No requests in the last 5 minutes")
        await expect(page.locator("#handoff-list")).to_contain_text("No hand-off is in flight")
        assert await seen.violations() == []
        for worker in list(router.whole.workers):
            worker.leave(on_request=False)
        router.whole.now_s += 1.0
        await expect(page.locator("#pools")).to_contain_text("no request can be served")


async def test_page_worker_states_are_labelled(browser):
    async with served() as router, tab(browser) as seen:
        stuck, draining = router.whole.workers[:2]
        router.whole.registry.load_changed(stuck.info.key, WorkerLoad(step_age_s=9.0))
        router.whole.registry.draining(draining.info.key, "told to")
        await seen.open(router.url)
        await seen.is_live()
        await expect(seen.page.locator(".badge[data-state=stuck]")).to_have_text("stuck: one step is taking too long")
        await expect(seen.page.locator(".badge[data-state=draining]")).to_contain_text("takes no new requests")
        assert await seen.violations() == []


@pytest.mark.slow
async def test_page_beyond_the_stream_limit_shows_the_refusal(browser):
    async with served(most=1) as router, tab(browser) as first, tab(browser) as second:
        await first.open(router.url)
        await first.is_live()
        await second.open(router.url)
        await expect(second.page.locator("#lost")).to_contain_text("too many status listeners (at most 1)")
        assert await second.violations() == []
        await first.page.close()
        await second.page.click("#retry")
        await second.is_live()


async def test_page_reports_lost_router_and_reconnects(browser):
    async with tab(browser) as seen:
        async with served() as router:
            await seen.open(router.url)
            await seen.is_live()
        lost = seen.page.locator("#lost")
        await expect(lost).to_contain_text("Last update: ")
        await expect(seen.page.locator("#link")).to_have_text("Disconnected")
        assert await seen.violations() == []
        await seen.page.click("#retry")
        await expect(lost).to_contain_text("No status: no connection.")
        async with served(port=int(router.url.split(":")[2].strip("/"))):
            await seen.is_live()
            await expect(lost).to_be_hidden()


async def test_playground_shows_error_of_router(browser):
    async with served() as router, tab(browser) as seen:
        await seen.open(router.url)
        await seen.is_live()
        await seen.page.fill("#max-tokens", "100000")
        await seen.page.fill("#prompt", "x " * 3000)
        await seen.page.click("#send")
        await expect(seen.page.locator("#ask-state")).to_have_text(re.compile("tokens"))
        await expect(seen.page.locator("#ask-state")).to_have_attribute("data-state", "failed")
        await expect(seen.page.locator("#send")).to_be_enabled()


class OtherSite(http.server.BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write no access log to standard error."""


_POST = """(url) => fetch(url, {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"},
  body: JSON.stringify({prompt: "hello", max_tokens: 4})}).then((answer) => answer.type)"""


async def test_page_of_other_site_cannot_reach_keyless_router(browser):
    async with served() as router, tab(browser) as seen:
        router.parts.say("hello")
        completions = f"{router.url}v1/completions"
        with answering(OtherSite) as site:
            await seen.open(site)
            # The page learns no more than that there was a response.
            assert await seen.page.evaluate(_POST, completions) == "opaque"
        assert router.parts.generator.requests == []
        rebound = await seen.page.goto(router.url.replace("127.0.0.1", "rebound.test"))
        assert rebound is not None
        assert rebound.status == 403
        await seen.open(router.url)
        assert await seen.page.evaluate(_POST, completions) == "basic"
        assert len(router.parts.generator.requests) == 1
