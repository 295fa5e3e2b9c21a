"""A broken gRPC stream resumes after its last response at another router: nothing twice, nothing lost."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from router.grpc.server import GrpcServer, build_server
from router.text.tokenizer import Tokenizer
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import HELLO, refused

TEXT = "the quick brown fox 漢字 😀 jumps over"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@asynccontextmanager
async def serve(parts: fakes.Servers) -> AsyncIterator[InferenceStub]:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        yield InferenceStub(channel)


def router(tokenizer: Tokenizer, *, seed: int = 99, **script: Any) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer, mint_seed=lambda: seed)
    parts.say(TEXT, cached_tokens=7, **script)
    return parts


def shown(answers: Iterable[pb.GenerateResponse]) -> tuple[dict[int, list[Any]], list[pb.Usage]]:
    """What a client has received of each choice, and of the usage."""
    choices: dict[int, list[Any]] = {}
    usages: list[pb.Usage] = []
    for answer in answers:
        has = choices.setdefault(answer.choice_index, ["", [], [], []])
        has[0] += answer.text
        has[1] += answer.token_ids
        has[2] += [probs.top[0].token_id for probs in answer.logprobs]
        has[3] += [answer.finish_reason] if answer.finish_reason else []
        usages += [answer.usage] if answer.HasField("usage") else []
    return choices, usages


def request_of(**more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=HELLO, sampling=common_pb2.SamplingParams(num_logprobs=1), **more)


REQUESTS = [
    request_of(),
    request_of(n=3),
    request_of(stop=["over"], n=2),
    pb.GenerateRequest(prompt="a", cache_salt="mine"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=["chat", "choices", "stop", "prompt"])
async def test_grpc_stream_broken_anywhere_is_resumed(tokenizer: Tokenizer, request_: pb.GenerateRequest) -> None:
    request = pb.GenerateRequest(stream_ids=True)
    request.MergeFrom(request_)
    first = router(tokenizer, per_delta=3, logprobs=True)
    # Batched otherwise, and the seed that it mints itself would be another.
    other = router(tokenizer, seed=1, per_delta=2, logprobs=True)
    async with serve(first) as stub, serve(other) as elsewhere:
        whole = [answer async for answer in stub.Generate(request)]
        assert all(answer.stream_id for answer in whole)
        for place, answer in enumerate(whole):
            request_.last_stream_id = answer.stream_id
            rest = [more async for more in elsewhere.Generate(request_)]
            assert shown([*whole[: place + 1], *rest]) == shown(whole)
            assert {more.id for more in rest} <= {answer.id}
            assert all(more.stream_id for more in rest)
    # Nothing is generated for a client that has everything.
    assert len(other.generator.requests) == len(whole) - 1
    assert {(routed.sampling.seed, routed.resumptions) for routed in other.generator.requests} == {(99, 1)}


async def test_grpc_stream_broken_repeatedly_is_resumed(tokenizer: Tokenizer) -> None:
    async with serve(router(tokenizer)) as stub:
        whole = [answer async for answer in stub.Generate(request_of(n=2))]
        has: list[pb.GenerateResponse] = []
        for _ in range(len(whole) + 1):
            last = has[-1].stream_id if has else ""
            more = [answer async for answer in stub.Generate(request_of(n=2, stream_ids=True, last_stream_id=last))]
            has += more[:2]  # the client gets no further
            if not more:
                break
        assert shown(has) == shown(whole)


async def test_grpc_stream_ids_are_sent_on_request_only(tokenizer: Tokenizer) -> None:
    async with serve(router(tokenizer)) as stub:
        assert not [answer.stream_id async for answer in stub.Generate(request_of()) if answer.stream_id]


async def test_grpc_stream_id_of_other_request_is_refused(tokenizer: Tokenizer) -> None:
    parts = router(tokenizer)
    async with serve(parts) as stub:
        whole = [answer async for answer in stub.Generate(request_of(stream_ids=True))]
        last = whole[1].stream_id
        others = [
            request_of(n=2),
            request_of(cache_salt="mine"),
            request_of(stop=["x"]),
            pb.GenerateRequest(prompt="a"),
        ]
        for other, sent in [*((other, last) for other in others), (request_of(), "made-up"), (request_of(), last[:-4])]:
            other.last_stream_id = sent
            error = await refused(stub.Generate(other))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(error.trailing_metadata())["tandem-error-param"] == "last_stream_id"
    assert len(parts.generator.requests) == 1
