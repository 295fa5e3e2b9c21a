"""The OpenAPI document matches the server: all routes, validated bodies and real answers."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from router.http.body.json_body import JsonBody
from router.http.body.strict_body import asks_for_nothing
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, app_of, client_of, routes_of
from tests.support.router.servers.openapi_check import Described
from tests.support.router.servers.whole_app import whole_app

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def parts() -> fakes.Servers:
    """One set for all: what a test asks for changes neither the document nor what comes of the next one's requests."""
    return fakes.make_servers(fakes.make_tokenizer())


@pytest.fixture(scope="module")
def app(parts: fakes.Servers) -> ASGIApp:
    """Makes its document once, for which it takes longer than for all that is compared with it."""
    return app_of(parts)


@pytest_asyncio.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as made:
        yield made


CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
STREAMED = {"stream": True}
WORDS = {"model": fakes.MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "the quick brown fox jumps"}]}
BY_NAME = {"name": "clock", "input_schema": {"type": "object"}}


async def test_openapi_answers_match_schemas(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    described = await Described.by(client)
    parts.say("hello", logprobs=True)
    for method, path, shown, body in (
        ("POST", CHAT, CHAT, HELLO | {"n": 2, "logprobs": True}),
        ("POST", CHAT, CHAT, {"messages": 5}),
        ("POST", PLAIN, PLAIN, {"prompt": ["a", "b"]}),
        ("POST", PLAIN, PLAIN, {"model": "gpt-4", "prompt": "a"}),
        ("POST", RESPONSES, RESPONSES, {"input": "a"}),
        ("POST", RESPONSES, RESPONSES, {"input": "a", "store": True}),
        ("POST", "/v1/messages", "/v1/messages", WORDS),
        ("POST", "/v1/messages", "/v1/messages", {"model": "gpt-4"}),
        ("POST", "/tokenize", "/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("POST", "/detokenize", "/detokenize", {"tokens": [5]}),
        ("GET", "/v1/models", "/v1/models", None),
        ("GET", f"/v1/models/{fakes.MODEL}", "/v1/models/{model}", None),
        ("GET", "/v1/models/gpt-4", "/v1/models/{model}", None),
        ("GET", "/v1/usage", "/v1/usage", None),
        ("GET", "/health", "/health", None),
        ("GET", "/readyz", "/readyz", None),
        ("GET", "/version", "/version", None),
    ):
        described.check(method, shown, await client.request(method, path, json=body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}),
        (CHAT, HELLO | {"tools": [CLOCK], "return_token_ids": True}),
        (CHAT, HELLO | {"functions": [CLOCK["function"]]}),
        (PLAIN, {"prompt": ["a", "b"], "echo": True, "stream_options": {"continuous_usage_stats": True}}),
        (RESPONSES, {"input": "a"}),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", **CLOCK["function"]}]}),
        ("/v1/messages", WORDS),
        ("/v1/messages", WORDS | {"tools": [BY_NAME]}),
    ],
)
async def test_openapi_events_match_schemas(
    client: httpx.AsyncClient, parts: fakes.Servers, path: str, body: dict[str, Any]
) -> None:
    described = await Described.by(client)
    headers = {"X-Tandem-Timing": "1"} | ({} if path == RESPONSES else {"X-Tandem-Stream-Ids": "1"})
    for text, script in (
        (f"hello {CALL}", {"logprobs": True}),
        ("hello", {"reason": FinishReason.LENGTH}),
        ("hello world", {"error": Overloaded("full"), "error_after": 2}),
    ):
        parts.say(text, **script)
        answer = await client.post(path, json=body | STREAMED, headers=headers)
        assert answer.headers["content-type"].startswith("text/event-stream")
        described.check("POST", path, answer)


def test_openapi_event_schema_rejects_other_events() -> None:
    """The comparison itself detects differences."""
    number = {"type": "string", "contentSchema": {"type": "integer"}}
    schema = {"type": "object", "required": ["data"], "properties": {"data": number}}
    responses = {"200": {"content": {"text/event-stream": {"itemSchema": schema}}}}
    described = Described({"components": {}, "paths": {"/x": {"get": {"responses": responses}}}})
    media = {"content-type": "text/event-stream"}
    described.check("GET", "/x", httpx.Response(200, headers=media, text="data: 5\n\n"))
    with pytest.raises(AssertionError):
        described.check("GET", "/x", httpx.Response(200, headers=media, text='data: "5"\n\n'))


@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        (CHAT, HELLO | {"tools": [], "store": False, "temperature": 0.5}, True),
        (CHAT, HELLO | {"store": True}, False),
        (CHAT, HELLO | {"temprature": 0.5}, False),
        (CHAT, {"messages": []}, False),
        (CHAT, HELLO | {"n": "2"}, False),
        (CHAT, HELLO | {"temperature": 2.5}, False),
        (CHAT, HELLO | {"top_p": 0}, False),
        (CHAT, HELLO | {"seed": 2**63}, False),
        (CHAT, HELLO | {"max_tokens": 0}, False),
        (CHAT, HELLO | {"max_tokens": 1}, True),
        (CHAT, HELLO | {"max_tokens": 2**31}, False),
        (CHAT, HELLO | {"max_tokens": 0, "prompt_logprobs": 0}, True),
        (CHAT, HELLO | {"max_tokens": 0, "prompt_logprobs": None}, False),
        (CHAT, HELLO | {"max_completion_tokens": 0}, False),
        (CHAT, HELLO | {"max_completion_tokens": 0, "prompt_logprobs": 1}, True),
        (CHAT, HELLO | {"min_tokens": -1}, False),
        (PLAIN, {"prompt": "a", "max_tokens": 0}, False),
        (PLAIN, {"prompt": "a", "max_tokens": 0, "echo": False}, False),
        (PLAIN, {"prompt": "a b", "max_tokens": 0, "echo": True}, True),
        (PLAIN, {"prompt": "a b", "max_tokens": 0, "prompt_logprobs": 1}, True),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, False),
        (RESPONSES, {"input": "a", "max_output_tokens": 1}, True),
        ("/v1/messages", WORDS | {"max_tokens": 0}, False),
        (CHAT, HELLO | {"stop": ["a"] * 17}, False),
        (PLAIN, {"prompt": [10_000]}, False),
        (PLAIN, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, False),
        (PLAIN, {"prompt": [[1, 2], [3]]}, True),
        (PLAIN, {"prompt": []}, False),
        (PLAIN, {"prompt": [1, "a"]}, False),
        (RESPONSES, {"input": [{"role": "user", "content": "a"}], "truncation": "disabled"}, True),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, False),
        (RESPONSES, {"input": 5}, False),
        ("/tokenize", {"prompt": "a", "more": 1}, False),
        ("/v1/messages", WORDS | {"system": "be brief"}, True),
        ("/v1/messages", WORDS | {"system": [{"type": "text", "text": "be brief"}]}, True),
        ("/v1/messages", WORDS | {"system": 5}, False),
        ("/detokenize", {"tokens": ["a"]}, False),
        ("/detokenize", {"tokens": []}, True),
    ],
)
async def test_openapi_body_schema_accepts_exactly_valid_bodies(
    client: httpx.AsyncClient, parts: fakes.Servers, path: str, body: dict[str, Any], fits: bool
) -> None:
    described = await Described.by(client)
    parts.say("hello")
    assert described.fits(described.body("POST", path), body) == fits
    assert ((await client.post(path, json=body)).status_code == 200) == fits


@pytest.mark.parametrize("keys", [(), ("a-key",)])
async def test_openapi_document_marks_routes_that_require_keys(keys: tuple[str, ...]) -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=keys))
    async with client_of(parts) as client:
        document = (await Described.by(client)).document
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == bool(operation["security"]), path


async def test_openapi_lists_all_api_routes_and_no_pages() -> None:
    app = whole_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        document = (await Described.by(client)).document
    paths = document["paths"]
    found = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    routes = {(method, route.path_format) for route in routes_of(app) for method in route.methods}
    pages = {path for _, path in routes - found}
    assert found < routes
    assert {"/", "/docs", "/status/app.js", "/status/icon.svg"} <= pages
    assert all(path in ("/", "/docs") or path.startswith("/status/") for path in pages)
    assert {("GET", "/status/snapshot"), ("GET", "/status/events"), ("GET", "/openapi.json")} <= found
    assert [path.startswith(("/v1/", "/v1beta/")) for path in paths] == sorted(
        (path.startswith(("/v1/", "/v1beta/")) for path in paths), reverse=True
    )
    operations = [operation for one in paths.values() for operation in one.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert all("422" not in operation["responses"] and operation["description"] for operation in operations)
    refs = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert refs <= document["components"]["schemas"].keys()
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()


async def test_openapi_bodies_match_validated_models() -> None:
    """Each body's class is the one that its route's dependency validates with."""
    app = whole_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        described = await Described.by(client)
    bodies = 0
    for route in routes_of(app):
        for body in [one.call for one in route.dependant.dependencies if isinstance(one.call, JsonBody)]:
            (method,) = route.methods
            assert described.body(method, route.path_format) == {"$ref": f"#/components/schemas/{body.model.__name__}"}
            properties = described.document["components"]["schemas"][body.model.__name__]["properties"]
            aliases = {field.alias or name for name, field in body.model.model_fields.items()}
            assert properties.keys() == aliases | asks_for_nothing(body.model).keys()
            bodies += 1
    assert bodies == 15
