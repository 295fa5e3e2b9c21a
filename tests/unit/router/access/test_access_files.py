"""No access without a key, for any spelling of a path; keys change while the router runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from starlette.routing import Mount, Route

from router.access.access_files import AccessControl
from router.access.api_keys import ApiKeyStore
from router.access.watched_files import FileWatcher
from router.admission.rate_limits import RateLimiter
from router.admission.shared_rate_limits import SharedRateLimits
from router.http.app import create_app
from router.http.routing.access import AccessGuard, ClientAccess, OperatorPage, PageAccess, access_of, check_access
from router.http.server.http_server import HttpServer
from tandem.config.access import OperatorAccess, is_shared
from tandem.config.admission import ApiKey, LimitsConfig
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError, Overloaded, Unauthenticated, Unavailable
from tandem.values.api_key import entry_of, kept_of, key_id, new_key
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import routes_of
from tests.support.router.servers.whole_app import whole_app

KEYED = RouterConfig(api_keys=("a-key",))
SPELLINGS = [
    "/v1/models",
    "/v1/%6dodels",
    "/v1%2Fmodels",
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/./models",
    "/v1/../v1/models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health;/v1/models",
    "/health/v1/models",
    "/health%00/v1/models",
    "/V1/MODELS",
    "/v1/models/tiny",
    "/v1/models/..%2f..%2fmetrics",
    "http://router/v1/models",
    "/v1/models?key=a-key",
    "/v1/models#health",
    "/debug/decisions",
    "/secret",
]


@asynccontextmanager
async def listening(config: RouterConfig) -> AsyncIterator[int]:
    """A real server; its port."""
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    parts.say("hello")
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as listener:
        yield listener.port


async def status(port: int, target: str, head: str = "", method: str = "GET") -> int:
    """The status of one request, with exactly this spelling."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n".encode("latin-1"))
    line = await reader.readline()
    await reader.read()
    writer.close()
    return int(line.split()[1])


async def test_path_in_any_spelling_without_key_is_refused() -> None:
    async with listening(KEYED) as port:
        for target in SPELLINGS:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                assert await status(port, target, method=method) in (400, 401), (method, target)
        assert [await status(port, target) for target in ("/health", "/readyz", "/metrics", "/version")] == [200] * 4


async def test_path_in_other_spelling_with_key_is_not_found() -> None:
    with_key = "Authorization: Bearer a-key\r\n"
    async with listening(KEYED) as port:
        found = {target: await status(port, target, with_key) for target in SPELLINGS}
    good = {"/v1/models", "/v1/models/tiny", "http://router/v1/models", "/v1/models?key=a-key"}
    assert {target for target, answer in found.items() if answer == 200} - {"/v1/models#health"} == good
    assert {answer for target, answer in found.items() if answer != 200} <= {400, 404}


@pytest.mark.parametrize(
    "head",
    [
        "Authorization: Bearer \r\n",
        "Authorization: Bearer a-ke\r\n",
        "Authorization: Bearer a-keyy\r\n",
        "Authorization: a-key\r\n",
        "Authorization: Bearer wrong\r\nx-api-key: a-key\r\n",
        f"Authorization: Bearer {entry_of('a-key')}\r\n",
        f"x-api-key: {entry_of('a-key')}\r\n",
        "x-tandem-tenant: admin\r\n",
        "x-api-key: \r\n",
    ],
)
async def test_access_guard_malformed_key_is_refused(head: str) -> None:
    async with listening(KEYED) as port:
        assert await status(port, "/v1/models", head) == 401


@pytest.mark.parametrize(
    "name", ["Authorization: Bearer ", "authorization: BEARER  ", "x-api-key: ", "x-goog-api-key: "]
)
async def test_access_guard_key_in_vendor_header_is_accepted(name: str) -> None:
    async with listening(RouterConfig(api_keys=(entry_of("a-key"),))) as port:
        assert await status(port, "/v1/models", f"{name}a-key\r\n") == 200


@pytest.mark.parametrize(
    ("access", "seen"),
    [
        ({}, {"/health": 200, "/readyz": 200, "/metrics": 200, "/version": 200}),
        ({"metrics": "key"}, {"/health": 200, "/metrics": 401, "/version": 200}),
        ({"health": "key", "readyz": "key", "version": "key"}, {"/health": 401, "/readyz": 401, "/version": 401}),
    ],
)
async def test_operator_access_setting_opens_chosen_pages(access: dict[str, str], seen: dict[str, int]) -> None:
    async with listening(RouterConfig(api_keys=("a-key",), operator_access=access)) as port:
        assert {page: await status(port, page) for page in seen} == seen
        with_key = {page: await status(port, page, "x-api-key: a-key\r\n") for page in seen}
        assert set(with_key.values()) == {200}


def test_access_beyond_loopback_leaves_only_probes_open() -> None:
    far = RouterConfig(host="10.0.0.2", api_keys=("a-key",))
    guard = AccessGuard(ApiKeyStore(far.api_keys), far)
    assert guard.is_open(OperatorPage.HEALTH)
    assert guard.is_open(OperatorPage.READYZ)
    assert not guard.is_open(OperatorPage.METRICS)
    assert not guard.is_open(OperatorPage.VERSION)


FAR = RouterConfig(
    host="10.0.0.2",
    api_keys=(
        {"key": "acmes", "tenant": "acme"},
        {"key": "others", "tenant": "other-company"},
        {"key": "new-heres", "tenant": "new-here"},
        {"key": "boss", "tenant": "us", "operator": True},
    ),
)
"""As of a server beyond loopback; the tests' listens on loopback all the same."""


@asynccontextmanager
async def server_used_by_two_tenants(config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A real server that has answered two tenants."""
    async with listening(config) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for key in ("acmes", "acmes", "others"):
            body = {"model": fakes.MODEL, "messages": [{"role": "user", "content": "hello"}]}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
            assert answer.status_code == 200, answer.text
        yield client


def tenants_in(page: str) -> set[str | None]:
    """Tenants of all series; None: a series without one."""
    families = text_string_to_metric_families(page)
    return {sample.labels.get("tenant") for family in families for sample in family.samples}


async def test_metrics_beyond_loopback_require_operator_key() -> None:
    async with server_used_by_two_tenants(FAR) as client:
        assert (await client.get("/metrics")).status_code == 401
        refused = await client.get("/metrics", headers={"x-api-key": "acmes"})
        assert refused.status_code == 403
        assert "router.operator_access.metrics" in refused.text
        assert "/v1/usage" in refused.text
        assert "other-company" not in refused.text
        everything = await client.get("/metrics", headers={"x-api-key": "boss"})
        assert everything.status_code == 200
        assert tenants_in(everything.text) == {None, "acme", "other-company"}


async def test_metrics_open_to_keys_show_only_own_tenant() -> None:
    for_keys = FAR.model_copy(update={"operator_access": OperatorAccess(metrics="key")})
    async with server_used_by_two_tenants(for_keys) as client:
        own = (await client.get("/metrics", headers={"x-api-key": "acmes"})).text
        assert tenants_in(own) == {"acme"}
        assert "other-company" not in own
        [cached] = [one for one in text_string_to_metric_families(own) if one.name == "tandem_tenant_cached_tokens"]
        assert [sample.value for sample in cached.samples if sample.name.endswith("_total")] == [14.0]
        assert (await client.get("/metrics", headers={"x-api-key": "new-heres"})).text == ""
        assert tenants_in((await client.get("/metrics", headers={"x-api-key": "boss"})).text) > {
            "acme",
            "other-company",
        }


def test_operator_access_unknown_value_is_refused() -> None:
    with pytest.raises(ValidationError, match="'open', 'key' or 'operator'"):
        RouterConfig(operator_access={"metrics": "tenant"})


def test_application_route_without_stated_access_is_refused() -> None:
    async def endpoint() -> dict[str, str]:
        return {}

    guard = AccessGuard(ApiKeyStore(), RouterConfig())
    clients, page = Depends(ClientAccess(guard)), Depends(PageAccess(guard, OperatorPage.VERSION))
    for dependencies in ([clients], [page], [clients, Depends(endpoint)]):
        api = FastAPI(openapi_url=None)
        api.add_api_route("/new", endpoint, dependencies=dependencies)
        check_access(api)
    for dependencies in ([], [Depends(endpoint)], [Depends(endpoint), clients], [clients, page]):
        api = FastAPI(openapi_url=None)
        router = APIRouter()
        router.add_api_route("/new", endpoint, dependencies=dependencies)
        api.include_router(router)
        with pytest.raises(TypeError, match="/new: the first dependency of a route must control access to it"):
            check_access(api)
    for of_starlette in (Route("/new", endpoint), Mount("/new", app=endpoint)):  # type: ignore[arg-type]
        api = FastAPI(openapi_url=None)
        api.routes.append(of_starlette)
        with pytest.raises(TypeError, match="/new"):
            check_access(api)


def test_application_routes_have_one_access_dependency_each() -> None:
    """All possible routes: with batches, profiles, named caches, decisions and a status."""
    found = {route.path: access_of(route) for route in routes_of(whole_app(KEYED))}
    pages = {path: access.page.value for path, access in found.items() if access.page is not None}
    assert pages.keys() - {path for path in pages if path.startswith("/status/")} == {
        "/health", "/readyz", "/metrics", "/version", "/openapi.json", "/", "/docs",
    }  # fmt: skip
    clients = found.keys() - pages.keys()
    assert {"/v1/chat/completions", "/v1/messages", "/v1beta/cachedContents", "/v1/files/{file_id}/content"} <= clients
    assert {"/debug/decisions", "/debug/pins", "/debug/profile/worker", "/status/events", "/v1/usage"} <= clients


async def test_application_routes_without_key_are_refused() -> None:
    """Except the public pages; and no request body is read."""
    app = whole_app(KEYED)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def never_sent() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read before a key was shown")
        yield b""

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for route in routes_of(app):
            (method,) = route.methods
            path = route.path_format.replace("{", "").replace("}", "")
            body = never_sent() if method in ("POST", "PATCH") else None
            answer = await client.request(method, path, content=body)
            assert (answer.status_code == 401) == (access_of(route).page is None), path


def test_key_file_entry_maps_digest_to_tenant() -> None:
    key = new_key()
    assert key != new_key()
    assert len(key) >= 43
    plain, digest = ApiKeyStore([ApiKey(key=key)]), ApiKeyStore([ApiKey(key=entry_of(key))])
    assert plain.tenant(f"Bearer {key}") == digest.tenant(f"Bearer {key}")
    caller = digest.authenticate({"authorization": f"Bearer {key}"})
    assert caller.key_id == key_id(kept_of(key))
    assert caller.key_id is not None
    assert caller.key_id not in key
    with pytest.raises(Unauthenticated):
        digest.tenant(f"Bearer {entry_of(key)}")


def write_keys(path: Path, text: str) -> None:
    """Replace the file atomically, as a careful operator does."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)


async def looked(keeper: AccessControl) -> None:
    """The watch's work of one second."""
    live = next(one for one in keeper._collectors if isinstance(one, FileWatcher))
    await live.check()


def reloads(keeper: AccessControl) -> dict[str, float]:
    live = next(one for one in keeper._collectors if isinstance(one, FileWatcher))
    changes = next(family for family in live.collect() if family.name == "tandem_file_reloads")
    return {sample.labels["result"]: sample.value for sample in changes.samples}


def accepted(keys: ApiKeyStore, *given: str) -> list[bool]:
    def passes(key: str) -> bool:
        try:
            keys.tenant(f"Bearer {key}")
        except Unauthenticated:
            return False
        return True

    return [passes(key) for key in given]


async def test_key_file_reload_applies_changes_and_rejects_broken_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, f"api_keys: [{{key: '{entry_of('one')}', tenant: acme}}]")
    async with AccessControl(RouterConfig(api_keys_file=str(path))) as keeper:
        keys = keeper.keys
        assert accepted(keys, "one", "two") == [True, False]
        write_keys(path, f"api_keys: ['{entry_of('two')}', '{entry_of('one')}']")
        await looked(keeper)
        assert accepted(keys, "one", "two") == [True, True]
        write_keys(path, f"api_keys: ['{entry_of('two')}']")
        await looked(keeper)
        assert accepted(keys, "one", "two") == [False, True]
        for broken in (
            "api_keys: [",
            "api_keys: []",
            "",
            "keys: [x]",
            "api_keys: ['sha256:1']",
            "- x",
            "api_keys: [a, a]",
            "api_keys: [2026-13-45]",
            "api_keys: [!!timestamp x]",
            "api_keys: [in-the-clear",
        ):
            write_keys(path, broken)
            await looked(keeper)
            assert accepted(keys, "one", "two") == [False, True], broken
        path.unlink()
        await looked(keeper)
        assert accepted(keys, "one", "two") == [False, True]
        assert reloads(keeper) == {"taken": 2.0, "refused": 11.0}
        assert "stays in force" in caplog.text
        assert entry_of("two") not in caplog.text
        assert "in-the-clear" not in caplog.text


async def test_key_file_unreadable_for_too_long_closes_access(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A FIFO in its place: a reader that blocks on it would never see a key revoked."""
    path, now = tmp_path / "keys.yaml", 0.0
    write_keys(path, f"api_keys: ['{entry_of('one')}', '{entry_of('two')}']")
    config = RouterConfig(api_keys_file=str(path), api_keys_trust_s=60.0)
    async with AccessControl(config, clock=lambda: now) as keeper:
        path.unlink()
        os.mkfifo(path, 0o600)
        now = 59.0
        await looked(keeper)
        assert accepted(keeper.keys, "one", "two") == [True, True]
        assert keeper.not_ready_reason() is None
        now = 60.0
        message = "no API key is accepted: router.api_keys_file was not read for 60 s"
        for headers in ({"authorization": "Bearer one"}, {"x-api-key": "nonsense"}, {}):
            with pytest.raises(Unavailable, match=message):
                keeper.keys.authenticate(headers)
        assert keeper.not_ready_reason() == message
        assert "keys.yaml: a FIFO, not a regular file; what was read before stays in force for 60 s" in caplog.text
        path.unlink()
        write_keys(path, f"api_keys: ['{entry_of('two')}']")
        await looked(keeper)
        assert accepted(keeper.keys, "one", "two") == [False, True]
        assert keeper.not_ready_reason() is None


async def test_key_file_reload_changes_tenant_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    one = f"api_keys: [{{key: '{entry_of('one')}', tenant: acme}}]\n"
    write_keys(path, one + "limits: {tenants: {acme: {requests_per_minute: 2}}}")
    limiter = RateLimiter(LimitsConfig(), clock=lambda: 0.0)
    shared = SharedRateLimits(limiter, tenants=(), tag_of=str.encode)
    async with AccessControl(RouterConfig(api_keys_file=str(path)), shared) as keeper:
        for _ in range(2):
            limiter.admit("acme", 1.0)
        with pytest.raises(Overloaded):
            limiter.admit("acme", 1.0)
        write_keys(path, one + "limits: {tenants: {acme: {requests_per_minute: 3}}}")
        await looked(keeper)
        limiter.admit("acme", 1.0)
        with pytest.raises(Overloaded):
            limiter.admit("acme", 1.0)
        write_keys(path, one)
        await looked(keeper)
        limiter.admit("acme", 1.0)
        assert limiter.num_inflight("acme") == 4


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (f"api_keys: ['{entry_of('a')}']", 0o640, "chmod 600"),
        (f"api_keys: ['{entry_of('a')}']", 0o604, "chmod 600"),
        ("api_keys: []", 0o600, "api_keys"),
        ("- a", 0o600, "^router.api_keys_file: .*keys.yaml: expected a mapping of sections, found list$"),
        ("api_keys: [", 0o600, "^router.api_keys_file: .*keys.yaml: line 1, column 12: while parsing"),
        (f"api_keys: ['{entry_of('a')}']\nlimits: {{tenants: {{x: {{}}}}}}", 0o600, "limits.tenants.x: no key"),
        (f"a: &a ['{entry_of('a')}']\napi_keys: *a", 0o600, "aliases"),
    ],
)
async def test_key_file_invalid_at_start_is_config_error(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=message):
        async with AccessControl(RouterConfig(api_keys_file=str(path))):
            pass
    with pytest.raises(ConfigError, match=r"router\.api_keys_file"):
        async with AccessControl(RouterConfig(api_keys_file=str(tmp_path / "absent"))):
            pass


def _about(mode: int, user: int, group: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, user, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "group", "shared"),
    [
        (0o600, 10001, 10001, False),
        (0o640, 10001, 10001, True),
        (0o440, 0, 10001, False),  # as Kubernetes mounts a secret for fsGroup 10001
        (0o444, 0, 10001, True),
        (0o460, 0, 10001, True),
        (0o440, 0, 100, True),
        (0o440, 7, 10001, True),
    ],
)
def test_key_file_may_be_readable_by_own_group(mode: int, owner: int, group: int, shared: bool) -> None:
    assert is_shared(_about(mode, owner, group), user=10001, groups=(10001,)) is shared
    assert is_shared(_about(mode, owner, group), user=0, groups=(0, 10001)) is bool(mode & 0o077)
