"""A model's own `generation_config.json`: read within bounds, and used for absent fields of every API."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from router.api.request.client_request import ClientRequest
from router.api.request.generation_defaults import GenerationDefaults, load_generation_defaults
from router.grpc.server import GrpcServer, build_server
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.values.sampling import SamplingParams
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import HELLO as GRPC_HELLO
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
DEFAULTS = GenerationDefaults(sampling=OWN, max_tokens=33)
CALLS: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    PLAIN: {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": fakes.MODEL, "max_tokens": 8, **HELLO},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer, defaults=DEFAULTS)
    parts.say("hello")
    return parts


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


@pytest.fixture
async def stub(parts: fakes.Servers) -> AsyncIterator[InferenceStub]:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as opened,
        grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}") as channel,
    ):
        yield InferenceStub(channel)


def sampled(parts: fakes.Servers) -> dict[str, float]:
    """The last request's sampling parameters."""
    return {name: getattr(parts.generator.requests[-1].sampling, name) for name in OWN}


@pytest.mark.parametrize("path", CALLS)
async def test_http_request_without_sampling_gets_model_defaults(
    parts: fakes.Servers, client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.post(path, json=CALLS[path])).status_code == 200
    assert sampled(parts) == OWN


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("stated", "top_k"), [({"temperature": 0}, 20), ({"temperature": 0, "top_k": 0}, 0), ({"top_k": 7}, 7)]
)
async def test_http_request_field_overrides_model_default(
    parts: fakes.Servers, client: httpx.AsyncClient, path: str, stated: dict[str, float], top_k: int
) -> None:
    assert (await client.post(path, json=CALLS[path] | stated)).status_code == 200
    assert sampled(parts) == OWN | stated | {"top_k": top_k}


async def test_grpc_request_gets_model_defaults_for_absent_fields(parts: fakes.Servers, stub: InferenceStub) -> None:
    for stated in ({}, {"temperature": 0.0, "top_k": 0}, {"repetition_penalty": 1.0}):
        sampling = common_pb2.SamplingParams(**stated)
        async for _ in stub.Generate(pb.GenerateRequest(chat=GRPC_HELLO, sampling=sampling)):
            pass
        assert sampled(parts) == OWN | stated


async def test_max_new_tokens_bounds_chats_without_max_tokens(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    expected = {CHAT: 33, PLAIN: 16, "/v1/responses": 33, "/v1/messages": 8}
    for path, body in CALLS.items():
        await client.post(path, json=body)
        assert parts.generator.requests[-1].sampling.max_tokens == expected[path]
    await client.post(CHAT, json=HELLO | {"max_completion_tokens": 99})
    assert parts.generator.requests[-1].sampling.max_tokens == 99


async def test_model_card_shows_the_defaults(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["default_sampling_params"] == {**OWN, "max_tokens": 33}
    async with client_of(fakes.make_servers(tokenizer)) as plain:
        assert (await plain.get(f"/v1/models/{fakes.MODEL}")).json()["default_sampling_params"] == {}


async def test_beam_search_ignores_sampling_defaults(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    answer = await client.post(PLAIN, json={"prompt": "hello", "use_beam_search": True, "n": 2})
    assert "repetition_penalty" not in answer.text
    assert parts.generator.requests[-1].sampling.repetition_penalty == 1.0


async def test_complete_sampling_params_ignore_model_defaults(parts: fakes.Servers) -> None:
    own = SamplingParams(temperature=0.5)
    (one,) = await parts.frontend.prepare_prompts(["x"], ClientRequest(sampling=own))
    assert one.request.sampling == own._replace(seed=99)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"temperature": 0.6, "top_p": None, "eos_token_id": [1, 2], "do_sample": True}, {"temperature": 0.6}),
        ({"top_k": -1, "max_new_tokens": 5, "transformers_version": "5"}, {"top_k": 0, "max_tokens": 5}),
        ({}, {}),
    ],
)
def test_generation_config_is_parsed_like_requests(
    tmp_path: Path, raw: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert load_generation_defaults(tmp_path).to_json() == expected


def test_model_without_generation_config_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": 2.5}', r"generation_config.json: temperature must be a number in \[0.0, 2.0\], got 2.5"),
        ('{"top_k": 1.5}', r"generation_config.json: top_k must be an integer in \[-1, "),
        ('{"top_p": true}', "generation_config.json: top_p must be a number"),
        ('{"max_new_tokens": 0}', r"generation_config.json: max_new_tokens must be an integer in \[1, "),
        ('{"temperature": NaN}', "generation_config.json: not valid JSON"),
        ("[" * 100_000, "generation_config.json: not valid JSON"),
        ("[]", "generation_config.json: must be a JSON object"),
    ],
)
def test_generation_config_beyond_bounds_is_refused_by_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_generation_defaults(tmp_path)
