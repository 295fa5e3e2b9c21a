"""/debug/profile: access, options, and one profile at a time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc.aio
import httpx
import pytest
from pydantic import SecretStr

from router.fleet.profiles import Profiles
from router.http.admin.profiles import ProfileRoutes
from router.http.app import OptionalRoutes, create_app
from router.types.worker_view import WorkerKey
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.config.telemetry import ProfilingConfig
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels, listen, make_server
from tandem.v1 import profiling_pb2 as pb
from tandem.v1.profiling_pb2_grpc import ProfilerServicer, add_ProfilerServicer_to_server
from tandem.values.ids import Incarnation, WorkerId
from tests.support.router.servers import fakes

AUTH = ClusterAuth(b"0123456789abcdef")
KEYED = RouterConfig(
    api_keys=(
        ApiKey(key=SecretStr("key-of-a-tenant"), tenant="a"),
        ApiKey(key=SecretStr("key-of-who-runs-it"), tenant="b", operator=True),
    )
)
ROUTER, WORKER = "/debug/profile/router", "/debug/profile/worker"
OPERATOR = {"Authorization": "Bearer key-of-who-runs-it"}


@pytest.fixture(scope="module")
def tokenizer():
    return fakes.make_tokenizer()


class Worker(ProfilerServicer):
    """Sends the trace that the test has set, once it may."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, float]] = []
        self.was_requested, self.go_on, self.was_left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.refuses: grpc.StatusCode | None = None

    async def Trace(self, request, context):
        self.requests.append((request.num_steps, request.timeout_s))
        self.was_requested.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        if self.refuses is not None:
            await context.abort(self.refuses, "because")
        yield pb.TracePart(content=b"one ", num_steps=3)
        yield pb.TracePart(content=b"two")


@asynccontextmanager
async def serving(worker: Worker | None) -> AsyncIterator[Mapping[WorkerKey, str]]:
    server = make_server(AUTH)
    if worker is not None:
        add_ProfilerServicer_to_server(worker, server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield {WorkerKey(WorkerId("decode-0"), Incarnation(1)): f"127.0.0.1:{port}"}
    finally:
        await server.stop(None)


@asynccontextmanager
async def http_server(tokenizer, addresses, **bounds) -> AsyncIterator[httpx.AsyncClient]:
    parts = fakes.make_servers(tokenizer, config=KEYED)
    bounds_ = ProfilingConfig(enabled=True, **bounds)
    profiles = Profiles(bounds_, lambda: addresses, AUTH.client_metadata(), ClusterChannels(None).open)
    extras = OptionalRoutes(profiles=ProfileRoutes(profiles))
    app = create_app(parts.frontend, parts.generator, parts.ready, KEYED, parts.metrics, extras)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


async def hangs_up(client: httpx.AsyncClient, path: str, query: str, leaves: asyncio.Event) -> int:
    """Request, and disconnect before the answer; returns the unread status."""
    sent: list[int] = []

    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message.get("status", 0))

    headers = [(name.lower().encode(), value.encode()) for name, value in OPERATOR.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": headers,
        "client": ("10.0.0.1", 1),
    }
    await client._transport.app(scope, receive, send)
    return sent[0]


async def test_profiles_require_operator_key(tokenizer):
    async with http_server(tokenizer, {}) as client:
        for path in (ROUTER, WORKER):
            assert (await client.post(path)).status_code == 401
            refused = await client.post(path, headers={"Authorization": "Bearer key-of-a-tenant"})
            assert refused.status_code == 403
            assert "operator" in refused.json()["error"]["message"]


async def test_profiles_disabled_name_the_setting(tokenizer):
    parts = fakes.make_servers(tokenizer, config=KEYED)
    app = create_app(parts.frontend, parts.generator, parts.ready, KEYED, parts.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post(ROUTER, headers=OPERATOR)
    assert answer.status_code == 404
    assert "profiling.enabled" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("shape", "media_type", "begins"),
    [
        ("speedscope", "application/json", b'{"$schema"'),
        ("svg", "image/svg+xml", b"<svg"),
        ("collapsed", "text/plain", b""),
    ],
)
async def test_router_profile_is_returned(tokenizer, shape, media_type, begins):
    async with http_server(tokenizer, {}) as client:
        answer = await client.post(ROUTER, params={"seconds": 0.05, "format": shape}, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.content.startswith(begins)
    assert b"event loop" in answer.content


async def test_flame_graph_is_drawn_off_the_event_loop(tokenizer, monkeypatch):
    drew = []

    def draw(tally, *, title):
        drew.append(threading.get_ident())
        return title

    monkeypatch.setattr("router.http.admin.profiles.flame_svg", draw)
    async with http_server(tokenizer, {}) as client:
        answer = await client.post(ROUTER, params={"seconds": 0.01, "format": "svg"}, headers=OPERATOR)
    assert answer.text.startswith("router, 0.01 s")
    assert drew
    assert drew != [threading.get_ident()]


@pytest.mark.parametrize(
    ("path", "query"), [(ROUTER, "seconds=60"), (WORKER, "worker=decode-0&seconds=60")], ids=["router", "worker"]
)
async def test_profile_of_departed_client_is_cancelled(tokenizer, monkeypatch, path, query):
    worker, sampling, stopped = Worker(), asyncio.Event(), threading.Event()

    class Sampler:
        """Takes as long as it may."""

        def __init__(self, loop):
            self._loop = loop

        def run(self, _seconds):
            self._loop.call_soon_threadsafe(sampling.set)
            stopped.wait()

        def stop(self):
            stopped.set()

    monkeypatch.setattr("router.fleet.profiles.StackSampler", Sampler)
    async with serving(worker) as addresses, http_server(tokenizer, addresses) as client:
        leaves = asyncio.Event()
        looking = asyncio.create_task(hangs_up(client, path, query, leaves))
        await (sampling if path == ROUTER else worker.was_requested).wait()
        leaves.set()
        assert await looking == 499
        if path == WORKER:
            await worker.was_left.wait()
        else:
            assert stopped.is_set()
        worker.go_on.set()
        again = await client.post(WORKER, params={"worker": "decode-0"}, headers=OPERATOR)
        assert again.status_code == 200, "nobody's look is under way any more"


@pytest.mark.parametrize(
    ("path", "params", "expected"),
    [
        (ROUTER, {"seconds": "61"}, "profiling.max_seconds"),
        (ROUTER, {"seconds": "0"}, "seconds"),
        (ROUTER, {"seconds": "nan"}, "seconds"),
        (ROUTER, {"seconds": "soon"}, "seconds"),
        (ROUTER, {"format": "pdf"}, "format"),
        (ROUTER, {"steps": "3"}, "parameter"),
        (WORKER, {}, "worker is required"),
        (WORKER, {"worker": "decode-9"}, "live workers: decode-0"),
        (WORKER, {"worker": "decode-0", "steps": "201"}, "profiling.max_steps"),
        (WORKER, {"worker": "decode-0", "steps": "1.5"}, "integer"),
    ],
)
async def test_profile_out_of_bounds_is_refused_by_name(tokenizer, path, params, expected):
    addresses = {WorkerKey(WorkerId("decode-0"), Incarnation(1)): "127.0.0.1:1"}
    async with http_server(tokenizer, addresses) as client:
        answer = await client.post(path, params=params, headers=OPERATOR)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


async def test_worker_trace_is_returned_one_at_a_time(tokenizer):
    worker = Worker()
    params = {"worker": "decode-0", "steps": "7", "seconds": "2.5"}
    async with serving(worker) as addresses, http_server(tokenizer, addresses) as client:
        first = asyncio.create_task(client.post(WORKER, params=params, headers=OPERATOR))
        await worker.was_requested.wait()
        for path, more in ((WORKER, params), (ROUTER, {"seconds": "0.01"})):
            assert (await client.post(path, params=more, headers=OPERATOR)).status_code == 429
        worker.go_on.set()
        answer = await first
        assert (answer.status_code, answer.content) == (200, b"one two")
        assert answer.headers["x-tandem-steps"] == "3"
        assert answer.headers["content-type"] == "application/gzip"
        assert worker.requests == [(7, 2.5)]
        assert (await client.post(ROUTER, params={"seconds": "0.01"}, headers=OPERATOR)).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "because"), (grpc.StatusCode.OUT_OF_RANGE, 503, "because")],
)
async def test_worker_trace_refusal_is_reported(tokenizer, code, status, expected):
    worker = Worker()
    worker.refuses = code
    worker.go_on.set()
    async with serving(worker) as addresses, http_server(tokenizer, addresses) as client:
        answer = await client.post(WORKER, params={"worker": "decode-0"}, headers=OPERATOR)
    assert answer.status_code == status
    assert expected in answer.json()["error"]["message"]


async def test_worker_without_profiling_is_reported(tokenizer):
    async with serving(None) as addresses, http_server(tokenizer, addresses) as client:
        answer = await client.post(WORKER, params={"worker": "decode-0"}, headers=OPERATOR)
    assert answer.status_code == 503
    assert "profiling.enabled is off there" in answer.json()["error"]["message"]


async def test_worker_trace_beyond_bound_is_refused(tokenizer):
    worker = Worker()
    worker.go_on.set()
    large = b"x" * 2048

    async def trace(request, context):
        yield pb.TracePart(content=large, num_steps=1)

    worker.Trace = trace
    async with serving(worker) as addresses, http_server(tokenizer, addresses, max_bytes=1024) as client:
        answer = await client.post(WORKER, params={"worker": "decode-0"}, headers=OPERATOR)
    assert answer.status_code == 503
    assert "profiling.max_bytes" in answer.json()["error"]["message"]
