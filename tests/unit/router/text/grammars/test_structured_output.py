"""Structured outputs as clients request them, over HTTP and gRPC, up to the sampling parameters that workers get."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.text.grammars.structured_output import MAX_CHOICES, Shape, StructuredOutput
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.config.servers import GrammarsConfig
from tandem.errors import InvalidRequest
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of


class Echo:
    """A checker that refuses one word."""

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        if "refuse me" in grammar:
            raise InvalidRequest(f"{param}: refused", param=param)
        return grammar + " as checked"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, grammars=Echo())


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


SCHEMA = {"type": "integer"}


@pytest.mark.parametrize(
    ("field", "shape", "value"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
         Shape.JSON_SCHEMA, SCHEMA),
        ({"response_format": {"type": "json_object"}}, Shape.JSON_OBJECT, None),
        ({"structured_outputs": {"json": SCHEMA}}, Shape.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, Shape.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Shape.JSON_OBJECT, None),
        ({"structured_outputs": {"regex": "a/b"}}, Shape.REGEX, "a/b"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Shape.CHOICE, ["a", "b"]),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Shape.GRAMMAR, "root ::= x"),
        ({"guided_json": SCHEMA}, Shape.JSON_SCHEMA, SCHEMA),
        ({"guided_regex": "a"}, Shape.REGEX, "a"),
        ({"guided_choice": ["a"]}, Shape.CHOICE, ["a"]),
        ({"guided_grammar": 'start: "a"'}, Shape.GRAMMAR, 'start: "a"'),
    ],
)  # fmt: skip
async def test_structured_output_every_form_reaches_workers(
    client: httpx.AsyncClient, parts: fakes.Servers, field: dict[str, Any], shape: Shape, value: object
) -> None:
    parts.say("hello")
    expected = StructuredOutput(shape=shape, value=value, param="x").grammar() + " as checked"
    for path, body in ((CHAT, HELLO), (PLAIN, {"prompt": "x"})):
        assert (await client.post(path, json=body | field)).status_code == 200
        assert parts.generator.requests[-1].sampling.grammar == expected


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = OBJECT | {"additionalProperties": False}


def as_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT, **more}}}


@pytest.mark.parametrize(
    ("field", "is_set", "expected"),
    [
        (as_format(strict=True), False, CLOSED),
        (as_format(strict=False), False, OBJECT),
        (as_format(), False, OBJECT),
        (as_format(), True, CLOSED),
        ({"guided_json": OBJECT}, False, OBJECT),
        ({"guided_json": OBJECT}, True, CLOSED),
        ({"structured_outputs": {"json": OBJECT}}, True, CLOSED),
        ({"response_format": {"type": "json_object"}}, True, {"type": "object"}),
    ],
)
async def test_schema_is_closed_if_strict_or_configured(
    tokenizer: Tokenizer, field: dict[str, Any], is_set: bool, expected: dict[str, Any]
) -> None:
    config = RouterConfig(grammars=GrammarsConfig(disable_additional_properties=is_set))
    parts = fakes.make_servers(tokenizer, config, grammars=Echo())
    grammar = StructuredOutput(shape=Shape.JSON_SCHEMA, value=expected, param="x").grammar() + " as checked"
    async with client_of(parts) as client:
        for path, body in ((CHAT, HELLO), (PLAIN, {"prompt": "x"})):
            parts.say("hello")
            assert (await client.post(path, json=body | field)).status_code == 200
            assert parts.generator.requests[-1].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "refuse me"}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
)
async def test_structured_output_unsupported_is_refused_by_field(
    client: httpx.AsyncClient, parts: fakes.Servers, change: dict[str, Any], param: str
) -> None:
    answer = await client.post(CHAT, json=HELLO | change)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert not parts.generator.requests


async def test_structured_output_without_checker_is_refused(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer)
    async with client_of(parts) as client:
        answer = await client.post(CHAT, json=HELLO | {"guided_regex": "a"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "guided_regex")
