"""Pages of other origins cannot use a router without keys; other clients can."""

from collections.abc import Mapping

import pytest

from router.access.browser_guard import BrowserGuard
from tandem.config.access import RouterTls
from tandem.config.cluster import RouterConfig
from tandem.errors import NotAllowed
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of, error_of

LOCAL = "127.0.0.1:8000"
CHAT_PAGE = "https://chat.example.com"
EVIL = {"Host": "evil.example:8000"}
TLS = RouterTls(cert="cert.pem", key="key.pem")


def refused(config: RouterConfig, headers: Mapping[str, str], method: str = "POST") -> str | None:
    """The header that a request is refused for; None if it is admitted."""
    guard = BrowserGuard.from_config(config)
    assert guard is not None
    try:
        guard.check(method, [(name.lower().encode(), value.encode()) for name, value in headers.items()])
    except NotAllowed as error:
        return error.param
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9000",
        "LOCALHOST",
        "localhost.",
        "a.localhost:1",
        LOCAL,
        "127.9.9.9",
        "[::1]:80",
        "[::1]",
    ],
)
def test_browser_guard_allows_loopback_host_on_any_port(host: str) -> None:
    assert refused(RouterConfig(), {"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example", "", "["],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_browser_guard_refuses_foreign_host_on_loopback(host: str, method: str) -> None:
    assert refused(RouterConfig(), {"Host": host}, method) == "Host"


def test_browser_guard_allows_any_host_beyond_loopback_or_with_tls() -> None:
    assert refused(RouterConfig(host="0.0.0.0", allow_open=True), EVIL) is None
    assert refused(RouterConfig(tls=TLS), EVIL) is None
    assert refused(RouterConfig(allowed_origins=("http://evil.example",)), EVIL) is None


@pytest.mark.parametrize(
    ("headers", "header"),
    [
        ({}, None),
        ({"Origin": f"http://{LOCAL}"}, None),
        ({"Origin": f"https://{LOCAL}"}, None),
        ({"Origin": CHAT_PAGE}, None),
        ({"Origin": "http://chat.example.com"}, "Origin"),
        ({"Origin": "http://localhost:3000"}, "Origin"),
        ({"Origin": "http://127.0.0.1"}, "Origin"),
        ({"Origin": "https://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": ""}, "Origin"),
        ({"Origin": f"file://{LOCAL}"}, "Origin"),
        ({"Sec-Fetch-Site": "same-origin"}, None),
        ({"Sec-Fetch-Site": "none"}, None),
        ({"Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site"),
        ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site"),
        ({"Sec-Fetch-Site": "cross-site", "Origin": CHAT_PAGE}, None),
    ],
)
@pytest.mark.parametrize("open_beyond", [False, True])
def test_browser_guard_checks_origin_except_for_get(
    headers: dict[str, str], header: str | None, open_beyond: bool
) -> None:
    host = "0.0.0.0" if open_beyond else "127.0.0.1"
    config = RouterConfig(host=host, allow_open=open_beyond, allowed_origins=(CHAT_PAGE,))
    assert refused(config, headers | {"Host": LOCAL}) == header
    assert refused(config, headers | {"Host": LOCAL}, "DELETE") == header
    assert refused(config, headers | {"Host": LOCAL}, "GET") is None


def test_browser_guard_client_certificate_does_not_allow_foreign_origin() -> None:
    """Browsers present their certificate on behalf of any page."""
    config = RouterConfig(tls=TLS.model_copy(update={"client_ca": "ca.pem"}))
    assert refused(config, {"Host": "router.example", "Origin": "https://evil.example"}) == "Origin"


def test_browser_guard_is_absent_when_keys_are_required() -> None:
    assert BrowserGuard.from_config(RouterConfig(api_keys=("a-key",))) is None
    assert BrowserGuard.from_config(RouterConfig(api_keys_file="keys.yaml")) is None


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/messages", "/tokenize"])
async def test_browser_guard_refuses_foreign_pages_on_every_route(path: str) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.say("hello")
    async with client_of(parts) as client:
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, EVIL):
            # As a form or `fetch` sends it without asking.
            answer = await client.post(
                path, content=b'{"messages": []}', headers={"Content-Type": "text/plain"} | headers
            )
            assert answer.status_code == 403
        assert (await client.get("/v1/models", headers=EVIL)).status_code == 403
        assert (await client.get("/no/such/route", headers=EVIL)).status_code == 403
        assert (await client.post(CHAT, json=HELLO, headers={"Origin": "http://localhost"})).status_code == 200
        error = error_of(await client.post(CHAT, json=HELLO, headers=EVIL))
    assert error["param"] == "Host"
    assert "router.allowed_origins" in error["message"]
    assert len(parts.generator.requests) == 1


async def test_router_with_keys_ignores_origins() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=("a-key",)))
    parts.say("hello")
    headers = EVIL | {"Origin": "https://evil.example", "Authorization": "Bearer a-key"}
    async with client_of(parts) as client:
        assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200
