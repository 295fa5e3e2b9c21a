"""The OpenAPI document says what the door does: all routes, bodies as they are validated, answers as they come."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from router.http.app import create_app
from tandem.config import RouterConfig
from tests.unit.router import doors
from tests.unit.router.http_doors import CHAT, HELLO, PLAIN, client_of

RESPONSES = "/v1/responses"


@pytest.fixture
def parts() -> doors.Doors:
    return doors.make_doors(doors.make_tokenizer())


@pytest_asyncio.fixture
async def client(parts: doors.Doors) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as made:
        yield made


async def document_of(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/openapi.json", headers={"Authorization": "Bearer a-key"})).json()


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


async def test_every_answer_is_as_described(client: httpx.AsyncClient, parts: doors.Doors) -> None:
    document = await document_of(client)
    parts.say("hello")
    for method, path, shown, body in (
        ("POST", CHAT, CHAT, HELLO | {"n": 2, "logprobs": True}),
        ("POST", CHAT, CHAT, {"messages": 5}),
        ("POST", PLAIN, PLAIN, {"prompt": ["a", "b"]}),
        ("POST", PLAIN, PLAIN, {"model": "gpt-4", "prompt": "a"}),
        ("POST", RESPONSES, RESPONSES, {"input": "a"}),
        ("POST", RESPONSES, RESPONSES, {"input": "a", "store": True}),
        ("POST", "/v1/messages", "/v1/messages", {"model": "gpt-4"}),
        ("POST", "/tokenize", "/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("POST", "/detokenize", "/detokenize", {"tokens": [5]}),
        ("GET", "/v1/models", "/v1/models", None),
        ("GET", f"/v1/models/{doors.MODEL}", "/v1/models/{name}", None),
        ("GET", "/v1/models/gpt-4", "/v1/models/{name}", None),
        ("GET", "/health", "/health", None),
        ("GET", "/readyz", "/readyz", None),
        ("GET", "/version", "/version", None),
    ):
        answer = await client.request(method, path, json=body)
        described = document["paths"][shown][method.lower()]["responses"][str(answer.status_code)]
        schema = described["content"]["application/json"]["schema"]
        assert not list(validator(document, schema).iter_errors(answer.json())), (path, answer.json())


@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        (CHAT, HELLO | {"tools": [], "store": False, "temperature": 0.5}, True),
        (CHAT, HELLO | {"store": True}, False),
        (CHAT, HELLO | {"temprature": 0.5}, False),
        (CHAT, {"messages": []}, False),
        (CHAT, HELLO | {"n": "2"}, False),
        (PLAIN, {"prompt": [[1, 2], [3]]}, True),
        (PLAIN, {"prompt": []}, False),
        (PLAIN, {"prompt": [1, "a"]}, False),
        (RESPONSES, {"input": [{"role": "user", "content": "a"}], "truncation": "disabled"}, True),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, False),
        (RESPONSES, {"input": 5}, False),
        ("/tokenize", {"prompt": "a", "more": 1}, False),
        ("/detokenize", {"tokens": ["a"]}, False),
        ("/detokenize", {"tokens": []}, True),
    ],
)
async def test_a_body_fits_the_document_if_and_only_if_it_is_taken(
    client: httpx.AsyncClient, parts: doors.Doors, path: str, body: dict[str, Any], fits: bool
) -> None:
    document = await document_of(client)
    parts.say("hello")
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert validator(document, schema).is_valid(body) == fits
    assert ((await client.post(path, json=body)).status_code == 200) == fits


@pytest.mark.parametrize("keys", [(), ("a-key",)])
async def test_it_says_where_a_key_is_asked_for(keys: tuple[str, ...]) -> None:
    parts = doors.make_doors(doors.make_tokenizer(), RouterConfig(api_keys=keys))
    async with client_of(parts) as client:
        document = await document_of(client)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == bool(operation["security"]), path


async def test_all_routes_are_in_it() -> None:
    parts = doors.make_doors(doors.make_tokenizer())
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
        document = await document_of(client)
    shown = {(method, path) for path, operations in document["paths"].items() for method in operations}
    routes = app._app.described()  # type: ignore[attr-defined]
    assert shown == {(method.lower(), path.replace("/*", "/{name}")) for method, path, *_ in routes}
    ids = [operation["operationId"] for one in document["paths"].values() for operation in one.values()]
    assert len(ids) == len(set(ids))
