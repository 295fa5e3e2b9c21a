"""Settings of servers and operation: keys and limits, pages, connections, TLS, traces, prices, profiles, addresses."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cli.cert import make_certificate
from tandem.rpc.tls_check import check_peer
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.settings.row import Asked, Row
from tests.support.certificates import Authority
from tests.support.node_processes import free_port
from tests.support.oracle import noise
from tests.support.otlp_receiver import OtlpHttpReceiver, otlp_http_receiver
from tests.support.redis_server import RedisServer
from tests.support.running_cluster import WAIT_S, body

OPERATOR = "key-of-operator"
PAGES = {
    "/health": "key",
    "/readyz": "key",
    "/metrics": "operator",
    "/version": "key",
    "/openapi.json": "key",
    "/": "key",
}
PRICES = {"prefill_second": 3.0, "decode_second": 5.0, "kv_gib_second": 7.0, "currency": "EUR"}


async def completion(asked: Asked, key: str, num_tokens: int = 4, **more: Any) -> httpx.Response:
    return await asked.post("/v1/completions", body(noise(1, 20), num_tokens, **more), key=key)


async def keys_are_limited(asked: Asked) -> None:
    """Pages want the keys that they should; each limit ends in 429; the audit log turns its file over."""
    for path, wanted in PAGES.items():
        statuses = [(await _bare(asked, path, key)).status_code for key in (None, "key-of-few", OPERATOR)]
        assert statuses == [401, 403 if wanted == "operator" else 200, 200], (path, statuses)
    few = [(await completion(asked, "key-of-few")).status_code for _ in range(4)]
    assert few == [200, 200, 200, 429], "requests a minute"
    thrifty = [(await completion(asked, "key-of-thrifty", 60)).status_code for _ in range(3)]
    assert (thrifty[0], thrifty[-1]) == (200, 429), "tokens a minute"
    at_once = await asyncio.gather(*(completion(asked, "key-of-single", 200) for _ in range(4)))
    assert sorted(response.status_code for response in at_once) == [200, 429, 429, 429], "concurrent requests"
    others = await asyncio.gather(*(completion(asked, "key-of-nobody", 100, priority=-9) for _ in range(4)))
    assert sorted(response.status_code for response in others) == [200, 200, 429, 429], "those of `default`"
    logs = sorted(path.name for path in asked.folder.glob("audit.jsonl*"))
    assert logs == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    last = (asked.folder / "audit.jsonl.1").read_text().splitlines()[-1]
    assert json.loads(last)["status"]


async def _bare(asked: Asked, path: str, key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=asked.cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
        return await http.get(path, headers=headers)


async def seconds_cost_money(asked: Asked) -> None:
    """By the table of prices: what the request reports is the sum of its parts."""
    answer = await asked.post("/v1/completions", body(noise(2, 200), 20), **{"X-Tandem-Timing": "1"})
    timing = answer.json()["timing"]
    cost = timing["cost"]
    assert cost["currency"] == "EUR"
    least = 3.0 * timing["prefill_s"] + 5.0 * timing["decode_s"]
    assert 0.9 * least <= cost["amount"] <= 1.5 * least + 0.1, timing


async def profiles_are_bounded(asked: Asked) -> None:
    """In seconds, steps and bytes."""
    for path, part in (
        ("/debug/profile/router?seconds=3", "2"),
        ("/debug/profile/worker?worker=decode-0&steps=6&seconds=1", "5"),
    ):
        response = await asked.cluster.http.post(path)
        assert response.status_code == 400, response.text
        assert part in response.text
    reading = asyncio.create_task(asked.cluster.stream(noise(3, 20), 400))
    response = await asked.cluster.http.post("/debug/profile/worker?worker=decode-0&steps=5&seconds=2")
    await reading
    assert response.status_code == 503, response.text
    assert "1024" in response.text
    await seconds_cost_money(asked)


async def connections_are_bounded(asked: Asked) -> None:
    """In number, and in how long they may say nothing: sooner than by default, which is what the waits below tell."""
    address = httpx.URL(asked.cluster.local.http_url)

    async def connect(first: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writers.append(writer)
        writer.write(first)
        return reader

    async def ends(reader: asyncio.StreamReader, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            await reader.read()

    writers: list[asyncio.StreamWriter] = []
    half = await connect(b"GET /health HTTP/1.1\r\nHost: 127")
    await ends(half, 12.0)  # and not after 15 s
    idle = []
    for _ in range(10):
        idle.append(await connect(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
        assert b" 200 " in await idle[-1].readuntil(b"\r\n\r\n")
    for reader in idle[:3]:
        await ends(reader, 12.0)  # six may be open, so not after 20 s
    await ends(idle[-1], WAIT_S)  # and not after 65 s
    for writer in writers:
        writer.close()
    address_of_grpc, own = asked.cluster.local.grpc_address, [("grpc.use_local_subchannel_pool", 1)]
    first, second = (grpc.aio.insecure_channel(address_of_grpc, own) for _ in range(2))
    async with first, second:
        assert (await InferenceStub(first).ListModels(pb.ListModelsRequest(), timeout=WAIT_S)).models
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await InferenceStub(second).ListModels(pb.ListModelsRequest(), timeout=5.0)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def certificate(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    Authority().issue(folder, name="127.0.0.1")
    return {}


def with_certificate(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def clients_need_certificates(asked: Asked) -> None:
    """Who has none does not get as far as a request."""
    without = ssl.create_default_context(cafile=asked.folder / "ca.pem")
    async with httpx.AsyncClient(base_url=asked.cluster.local.http_url, verify=without, trust_env=False) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/health")


async def keys_in_a_file(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    _write_keys(folder / "keys.yaml")
    return {}


def _write_keys(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps({"api_keys": [{"key": OPERATOR, "operator": True}]}))


async def keys_are_not_trusted_for_ever(asked: Asked) -> None:
    """Once their file is gone; and again when it is back."""

    async def status(wanted: int) -> bool:
        return (await asked.post("/v1/completions", body(noise(7, 20), 4))).status_code == wanted

    (asked.folder / "keys.yaml").unlink()
    assert await status(200), "for three seconds"
    await asked.cluster.until(lambda: status(503))
    _write_keys(asked.folder / "keys.yaml")
    await asked.cluster.until(lambda: status(200))


async def pages_of_one_origin_may_ask(asked: Asked) -> None:
    """And of no other."""
    for origin, status in (("https://chat.example.com", 200), ("https://evil.example.com", 403)):
        response = await asked.post("/v1/completions", body(noise(1, 20), 4), Origin=origin)
        assert response.status_code == status, response.text


def traced(*, is_trusted: bool) -> Any:
    """Nobody's requests are, but those of clients that say so and may."""

    async def check(asked: Asked) -> None:
        receiver: OtlpHttpReceiver = asked.names["receiver"]
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        answer = await asked.cluster.http.post("/v1/completions", json=body(noise(4, 100), 4), headers=headers)
        assert answer.status_code == 200

        async def received() -> bool:
            return any(span.name == "tandem.decode" for span in receiver.spans)

        if is_trusted:
            await asked.cluster.until(received)
            assert {span.trace_id for span in receiver.spans} == {trace}
            assert receiver.metadata[0]["x-collector-key"] == "abc"
        else:
            assert receiver.spans == []
        within = await asked.cluster.figure("tandem_requests_within_objectives_total")
        assert within == 0, "no first token comes within a microsecond"

    return check


async def collector(_: Path, stack: AsyncExitStack) -> Mapping[str, Any]:
    receiver = await stack.enter_async_context(otlp_http_receiver())
    return {"receiver": receiver, "port": receiver.port}


def otlp(trust: str) -> Mapping[str, Any]:
    return {
        "telemetry.otlp_endpoint": "http://127.0.0.1:{port}",
        "telemetry.otlp_protocol": "http/protobuf",
        "telemetry.otlp_headers": {"x-collector-key": "abc"},
        "telemetry.sample_ratio": 0.0,
        "telemetry.trust_clients": trust,
        "telemetry.objectives": {"ttft_s": 1e-6, "per_token_s": 1e-6},
    }


async def two_ports(_: Path, _stack: AsyncExitStack) -> Mapping[str, Any]:
    return {"prefill_health": free_port(), "decode_health": free_port()}


async def workers_say_that_they_serve(asked: Asked) -> None:
    """At their own addresses, and at the ports where the kubelet asks."""
    hosts = {worker.role.value: worker.address.partition(":")[0] for worker in asked.cluster.local.workers}
    assert hosts == {"prefill": "127.0.0.2", "decode": "127.0.0.3"}
    for role, host in hosts.items():
        async with grpc.aio.insecure_channel(f"{host}:{asked.names[f'{role}_health']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status is health_pb2.HealthCheckResponse.SERVING


async def redis_behind_tls(folder: Path, stack: AsyncExitStack) -> Mapping[str, Any]:
    """A real Redis, reached through a server that ends TLS, as the one that the tests bring speaks none."""
    Authority().issue(folder, name="127.0.0.1")
    server = stack.enter_context(RedisServer(password="of-redis"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, to_redis[1]), pump(to_redis[0], writer))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    stack.push_async_callback(proxy.wait_closed)
    stack.callback(proxy.close)
    return {"redis": f"rediss://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", "server": server}


async def member(folder: Path, _: AsyncExitStack) -> Mapping[str, Any]:
    """A certificate of this cluster, in one text."""
    make_certificate(folder, "member", days=3)
    parts = (folder / name for name in ("member.key", "member.pem", "ca.pem"))
    return {"pem": "".join(part.read_text() for part in parts)}


async def workers_speak_only_tls(asked: Asked) -> None:
    for worker in asked.cluster.local.workers:
        found = await check_peer(worker.address, None)
        assert found.mismatch is not None
        assert "accepts only TLS" in found.mismatch


async def time_is_bounded(asked: Asked) -> None:
    """A request that is not over by then ends with what it has, or an error that says so."""
    response = await asked.post("/v1/completions", body(noise(6, 20), 1900, n=16))
    assert response.status_code in (408, 504), (response.status_code, response.text[:300])


async def keys_begin_with_cluster(asked: Asked) -> None:
    names = [name.decode() for name in asked.names["server"].client.keys("*")]
    assert names
    assert all(name.startswith("{tandem:mine}:") for name in names), names


ROWS = {
    "keys": Row(
        settings={
            "router.api_keys": [
                {"key": OPERATOR, "tenant": "operators", "operator": True},
                {"key": "key-of-few", "tenant": "few"},
                {"key": "key-of-thrifty", "tenant": "thrifty"},
                {"key": "key-of-single", "tenant": "single"},
                {"key": "key-of-nobody", "tenant": "nobody"},
            ],
            "router.limits": {
                "default": {
                    "requests_per_minute": 50,
                    "tokens_per_minute": 100_000,
                    "concurrent_requests": 2,
                    "weight": 2.0,
                    "best_priority": 1,
                },
                "tenants": {
                    "few": {"requests_per_minute": 3, "weight": 3.0},
                    "thrifty": {"tokens_per_minute": 100, "best_priority": 2},
                    "single": {"concurrent_requests": 1},
                    "operators": {},
                },
            },
            "router.operator_access": {
                "health": "key",
                "readyz": "key",
                "metrics": "operator",
                "version": "key",
                "openapi": "key",
                "page": "key",
            },
            "router.audit_log": {"path": "{folder}/audit.jsonl", "max_bytes": 1000, "keep": 2},
        },
        check=keys_are_limited,
        key=OPERATOR,
    ),
    "prices-and-profiles": Row(
        settings={
            "prices": PRICES,
            "profiling": {"enabled": True, "max_seconds": 2.0, "max_steps": 5, "max_bytes": 1024},
        },
        check=profiles_are_bounded,
    ),
    "keys-file": Row(
        settings={"router.api_keys_file": "{folder}/keys.yaml", "router.api_keys_trust_s": 3.0},
        start=keys_in_a_file,
        check=keys_are_not_trusted_for_ever,
        key=OPERATOR,
    ),
    "connections": Row(
        settings={
            "router.connections": {"head_timeout_s": 1.0, "keep_alive_s": 20.0, "max_http": 6, "max_grpc": 1},
        },
        check=connections_are_bounded,
    ),
    "client-certificates": Row(
        settings={
            "router.tls": {"cert": "{folder}/cert.pem", "key": "{folder}/key.pem", "client_ca": "{folder}/ca.pem"}
        },
        start=certificate,
        believes=with_certificate,
        check=clients_need_certificates,
    ),
    "origins": Row(
        settings={
            "router.allowed_origins": ["https://chat.example.com"],
            "router.allow_open": True,
            "router.operator_access": {"metrics": "open", "version": "open", "openapi": "open"},
        },
        check=pages_of_one_origin_may_ask,
    ),
    "traces-of-all": Row(settings=otlp("all"), start=collector, check=traced(is_trusted=True)),
    "traces-of-none": Row(settings=otlp("none"), start=collector, check=traced(is_trusted=False)),
    "addresses": Row(
        settings={
            "prefill.host": "127.0.0.2",
            "decode.host": "127.0.0.3",
            "prefill.health_port": "{prefill_health}",
            "decode.health_port": "{decode_health}",
        },
        start=two_ports,
        check=workers_say_that_they_serve,
    ),
    "redis": Row(
        settings={
            "redis": {
                "url": "{redis}",
                "password": "of-redis",
                "ca": "{folder}/ca.pem",
                "cluster": "mine",
                "timeout_s": 5.0,
                "lease_s": 10.0,
            }
        },
        start=redis_behind_tls,
        check=keys_begin_with_cluster,
    ),
    "tls-in-one-text": Row(
        settings={"cluster.tls": {"mode": "required", "pem": "{pem}"}, "transfer.transport": "tcp"},
        start=member,
        check=workers_speak_only_tls,
    ),
    "patience": Row(
        settings={
            "secret": "of this cluster alone",
            "router.request_timeout_s": 6.0,
            "engine.stall_s": 20.0,
            "cluster.tls": {"mode": "off"},
        },
        check=time_is_bounded,
    ),
}
