"""A request's span at both servers, and the trace context that workers get."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest

from router.api.request_meter import RequestMeter
from router.grpc.server import GrpcServer, build_server
from router.metrics.router_metrics import RouterMetrics
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.errors import Unavailable
from tandem.telemetry.tracing import context_from_text
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.values.roles import WorkerRole
from tests.support.calls import calls_into
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import LONG_PROMPT, cluster, collect, routed
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of
from tests.support.spans import CLIENT, CLIENT_SPAN_ID, CLIENT_TRACE_ID, Kept, keeping


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def traced(tokenizer: Tokenizer) -> tuple[fakes.Servers, Kept]:
    tracer, kept = keeping()
    parts = fakes.make_servers(tokenizer, tracer=tracer)
    return parts, kept


@pytest.fixture
async def client(traced: tuple[fakes.Servers, Kept]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(traced[0]) as client:
        yield client


async def test_http_request_with_trace_context_joins_the_trace(traced: Any, client: httpx.AsyncClient) -> None:
    parts, kept = traced
    ids = parts.say("hello")
    headers = {"traceparent": CLIENT.to_text(), "tracestate": "a=1"}
    assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200
    span = kept.one(f"chat {fakes.MODEL}")
    assert (span.parent_id, span.trace_id, span.context.tracestate) == (CLIENT_SPAN_ID, CLIENT_TRACE_ID, "a=1")
    [request] = parts.generator.requests
    assert span.attributes["tandem.request.id"] == request.request_id
    assert span.attributes["gen_ai.usage.input_tokens"] == len(request.prompt_token_ids)
    assert span.attributes["gen_ai.usage.output_tokens"] == len(ids)
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 7
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.response.model"] == span.attributes["gen_ai.request.model"]
    assert span.attributes["gen_ai.request.temperature"] == request.sampling.temperature
    assert [event.name for event in span.events] == ["first_token"]
    assert kept.parent_of("tandem.preprocess") == span.name
    assert not any("hello" in str(value) for span in kept.spans for value in span.attributes.values())


async def test_request_without_trace_context_begins_a_trace(traced: Any, client: httpx.AsyncClient) -> None:
    parts, kept = traced
    parts.say("hello")
    for headers in ({}, {"traceparent": "nonsense"}, {"traceparent": CLIENT.to_text()[:-1] + "0"}):
        assert (await client.post(PLAIN, json={"prompt": "hello"}, headers=headers)).status_code == 200
    requests = [span for span in kept.spans if span.is_request]
    assert [span.parent_id for span in requests] == [None, None], "and one whose client wanted none"
    assert len({span.trace_id for span in requests}) == 2


async def test_failed_request_span_has_error_status(traced: Any, client: httpx.AsyncClient) -> None:
    parts, kept = traced
    parts.say("hello", error=Unavailable("no workers"))
    assert (await client.post(CHAT, json=HELLO)).status_code == 503
    span = kept.one(f"chat {fakes.MODEL}")
    assert span.error == span.attributes["error.type"] == "UNAVAILABLE"


async def test_grpc_request_with_trace_context_joins_the_trace(traced: Any) -> None:
    parts, kept = traced
    parts.say("hello")
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        metadata = (("traceparent", CLIENT.to_text()), ("tracestate", "a=1"))
        call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="hello"), metadata=metadata)
        assert [response async for response in call]
    span = kept.one(f"text_completion {fakes.MODEL}")
    assert (span.parent_id, span.trace_id, span.context.tracestate) == (CLIENT_SPAN_ID, CLIENT_TRACE_ID, "a=1")


KEYS = [{"key": "tenants", "tenant": "a"}, {"key": "operators", "tenant": "b", "operator": True}]


@pytest.mark.parametrize("over_grpc", [False, True], ids=["http", "grpc"])
async def test_trace_sampling_follows_operator_keys_only(over_grpc: bool, tokenizer: Tokenizer) -> None:
    tracer, kept = keeping(sample_ratio=0.0, trusted="operators")
    parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=KEYS), tracer=tracer)
    parts.say("hello")

    async def over_http(key: str) -> None:
        headers = {"traceparent": CLIENT.to_text(), "Authorization": f"Bearer {key}"}
        async with client_of(parts) as client:
            assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200

    async def called(key: str) -> None:
        server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
        async with (
            GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
        ):
            metadata = (("traceparent", CLIENT.to_text()), ("authorization", f"Bearer {key}"))
            call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="hello"), metadata=metadata)
            assert [response async for response in call]

    for key in ("tenants", "operators"):
        await (called if over_grpc else over_http)(key)
        parts.say("hello")
    assert [span.trace_id for span in kept.spans if span.is_request] == [CLIENT_TRACE_ID]


async def test_workers_receive_the_parent_span() -> None:
    tracer, kept = keeping()
    decode, prefill = FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router:
        span = tracer.request("request", CLIENT, 0.0)
        assert span is not None
        await collect(router.generate(routed(LONG_PROMPT, span=span)))
        submit = (await decode.submissions.get()).submit
        assert context_from_text(submit.trace) == span.context
        span.end()
        place = kept.one("tandem.place")
        assert kept.parent_of("tandem.place") == "request"
        assert (place.attributes["tandem.decode_worker"], place.attributes["tandem.prefill_worker"]) == ("d0", "p0")
        await collect(router.generate(routed(request_id="r2")))
        assert not (await decode.submissions.get()).submit.HasField("trace")


@pytest.mark.parametrize("is_traced", [False, True])
def test_traced_request_adds_no_work_per_token(is_traced: bool) -> None:
    tracer, kept = keeping()
    span = tracer.request("request", None, 0.0) if is_traced else None
    with RequestMeter(RouterMetrics("m"), lambda: 1.0, prompt_tokens=1, choices=1, span=span) as meter:
        meter.tokens(0, 1)
        with calls_into("tandem/telemetry/otel_tracer.py") as calls:
            for _ in range(1000):
                meter.tokens(0, 1)
    assert not calls
    assert len(kept.spans) == is_traced
