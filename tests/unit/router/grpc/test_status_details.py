"""Error details for gRPC clients of any language: `google.rpc.Status` with the field and the retry time."""

from collections.abc import AsyncIterator

import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from router.grpc.server import GrpcServer, build_server
from tandem.errors import ContextLengthExceeded, Overloaded, Unavailable
from tandem.rpc.cluster_grpc import SERVER_OPTIONS
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import HELLO, details_of, refused


@pytest.fixture(scope="module")
def parts() -> fakes.Servers:
    return fakes.make_servers(fakes.make_tokenizer())


@pytest.fixture
async def stub(parts: fakes.Servers) -> AsyncIterator[InferenceStub]:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        yield InferenceStub(channel)


async def test_grpc_status_names_invalid_field(stub: InferenceStub) -> None:
    request = pb.GenerateRequest(chat=HELLO, n=0)
    error = await refused(stub.Generate(request))
    status, found = details_of(error)
    assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], error.details())
    assert (found[ErrorInfo].reason, found[ErrorInfo].domain) == ("INVALID_REQUEST", "tandem")
    (violation,) = found[BadRequest].field_violations
    assert (violation.field, violation.description) == ("n", error.details())
    assert RetryInfo not in found


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.25), Unavailable("nobody", retry_after_s=0.5)])
async def test_grpc_status_has_retry_delay(
    parts: fakes.Servers, stub: InferenceStub, error: Overloaded | Unavailable
) -> None:
    parts.generator.script = fakes.Script(error=error)
    error_ = await refused(stub.Generate(pb.GenerateRequest(chat=HELLO)))
    _, found = details_of(error_)
    assert found[RetryInfo].retry_delay.ToNanoseconds() == error.retry_after_s * 1e9
    assert dict(error_.trailing_metadata())["retry-after"] == f"{error.retry_after_s:.3f}"
    assert BadRequest not in found


async def test_grpc_status_has_error_reason(parts: fakes.Servers, stub: InferenceStub) -> None:
    long = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * fakes.CONTEXT))
    _, found = details_of(await refused(stub.Generate(long)))
    assert found[ErrorInfo].reason == "CONTEXT_LENGTH_EXCEEDED"
    parts.generator.script = fakes.Script(error=ContextLengthExceeded("x" * 5000, param="prompt"))
    status, _ = details_of(await refused(stub.Generate(pb.GenerateRequest(chat=HELLO))))
    assert len(status.message) == 1000


async def test_grpc_empty_or_unknown_model_is_not_found(stub: InferenceStub) -> None:
    assert (await stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
    for model in ("", "other"):
        error = await refused(stub.Tokenize(pb.TokenizeRequest(model=model, text="a")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details_of(error)[1][BadRequest].field_violations[0].field == "model"


async def test_grpc_tokenize_returns_bytes_and_omits_generation_prompt(
    parts: fakes.Servers, stub: InferenceStub
) -> None:
    response = await stub.Tokenize(pb.TokenizeRequest(text="hello 漢", return_token_bytes=True))
    assert b"".join(response.token_bytes).decode().strip() == "hello 漢"
    whole = await stub.Tokenize(pb.TokenizeRequest(chat=HELLO))
    without = await stub.Tokenize(pb.TokenizeRequest(chat=HELLO, add_generation_prompt=False))
    assert list(whole.token_ids) == [*without.token_ids, fakes.ASSISTANT]
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model.created_s == parts.frontend.model.created_s


async def test_grpc_honours_the_fields_of_http(parts: fakes.Servers, stub: InferenceStub) -> None:
    parts.say("hello world STOP")
    request = pb.GenerateRequest(
        prompt="a b c",
        stop=["STOP"],
        include_stop_str_in_output=True,
        truncate_prompt_tokens=2,
        bad_words=["fox"],
        request_id="mine",
        skip_special_tokens=False,
    )
    answers = [answer async for answer in stub.Generate(request)]
    assert "".join(answer.text for answer in answers) == "hello world STOP"
    assert {answer.id for answer in answers} == {"mine"}
    routed = parts.generator.requests[-1]
    assert len(routed.prompt_token_ids) == 2
    fox = tuple(parts.tokenizer.encode("fox", add_special_tokens=False))
    assert fox in routed.sampling.bad_words


def test_grpc_keepalive_options_have_known_names() -> None:
    """gRPC ignores misspelt ones silently."""
    kept = dict(SERVER_OPTIONS)
    assert kept["grpc.http2.max_ping_strikes"] == 0
    assert kept["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert kept["grpc.keepalive_permit_without_calls"] == 1
