"""Closed schemas allow only the named properties, and never more than the original schemas."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.grammars import structured_output
from router.text.grammars.closed_schema import closed_schema
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.grammars.tool_calls import CallGrammar
from router.text.tool_parsers.families import HERMES
from router.text.tools import ToolDefinition, ToolUse
from tandem.errors import InvalidRequest
from tandem.model_path import model_directory

NAMES = "abc"


def fields(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


@pytest.fixture(scope="module")
def tokens() -> Any:
    text = (Path(model_directory("builtin")) / "tokenizer.json").read_text()
    return llguidance.LLTokenizer(text, n_vocab=2048, eos_token=[2])


def allows(tokens: Any, schema: Any, value: Any) -> bool:
    """Whether a grammar of the closed schema allows this value, with its properties in some order."""
    grammar = StructuredOutput(
        shape=Shape.JSON_SCHEMA, value=schema, param="x", disables_additional_properties=True
    ).grammar()
    orders = map(dict, permutations(value.items())) if isinstance(value, dict) else [value]
    return any(follows(tokens, grammar, json.dumps(ordered, separators=(",", ":"))) for ordered in orders)


def follows(tokens: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


NODE = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": fields("a", properties={"a": {}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
    },
}
PARTS = {
    "allOf": [{"$ref": "#/$defs/left"}, {"$ref": "#/$defs/right"}],
    "properties": {"own": {"type": "integer"}, "left": {"$ref": "#/$defs/left"}},
    "$defs": {"left": fields("a", required=["a"]), "right": fields("b", required=["b"])},
}
EITHER = {
    "properties": {"kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "anyOf": [fields("a"), fields("b", patternProperties={"^x-": {"type": "integer"}})],
    "type": "object",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (fields("a"), [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        (fields("a", required=["b"]), [{"b": "x"}], [{"b": 1, "c": 1}]),
        (fields(), [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, {"a": {"b": 1}}], []),
        ({"type": "object", "properties": {"any": {"type": "object"}}}, [{"any": {"z": 1}}], [{"z": 1}]),
        (fields("a", additionalProperties=True), [{"z": 1}], []),
        (fields("a", additionalProperties=fields("b")), [{"z": {"b": 1}}], [{"z": {"c": 1}}, {"z": 1}]),
        (fields("a", patternProperties={"^x": {"type": "integer"}}), [{"a": 1, "xy": 1}], [{"b": 1}, {"xy": "t"}]),
        (fields("a", unevaluatedProperties=False), [{"a": 1}], [{"b": 1}]),
        (fields("a", required=["a"], minProperties=1), [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "array", "items": fields("a")}, [[{"a": 1}, {}]], [[{"b": 1}]]),
        ({"type": "array", "prefixItems": [fields("a")], "items": False}, [[{"a": 1}]], [[{"b": 1}]]),
        (NODE, [{"node": {"a": 1, "next": {"a": 2}}}, {"node": {"next": None}}], [{"node": {"next": {"z": 1}}}]),
        ({"$ref": "#/$defs/x", "$defs": {"x": fields("a")}}, [{"a": 1}], [{"b": 1}]),
        ({"allOf": [{"$ref": "#/definitions/x"}], "definitions": {"x": fields("a")}}, [{"a": 1}], [{"b": 1}]),
        (
            PARTS,
            [{"own": 1, "left": {"a": 1}, "a": 1, "b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"left": {"a": 1, "b": 1}, "a": 1, "b": 1}],
        ),
        ({"allOf": [fields("a"), fields("b", additionalProperties=True)]}, [{"a": 1, "c": 1}], [{"a": "x"}]),
        (
            EITHER,
            [{"kind": "a", "a": 1}, {"kind": "a", "b": 1, "x-1": 1}],
            [{"kind": "a", "a": 1, "b": 1}, {"kind": "a", "z": 1}, {"a": 1}],
        ),
        ({"anyOf": [fields("a"), {"type": "null"}, {"type": "string"}]}, [{"a": 1}, None, "x"], [{"b": 1}]),
        ({"oneOf": [fields("a", required=["a"]), {"type": "null"}]}, [{"a": 1}, None], [{"a": 1, "b": 1}]),
        ({"type": ["object", "null"], "properties": {"a": {}}}, [None, {"a": [1]}], [{"b": 1}]),
        ({"properties": {"properties": fields("$ref")}, "type": "object"}, [{"properties": {"$ref": 1}}], [{"a": 1}]),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", **fields("a")}}}, [{"b": 1}], []),
    ],
)
def test_closed_schema_allows_only_named_properties(tokens: Any, schema: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert allows(tokens, schema, value), value
    for value in bad:
        assert not allows(tokens, schema, value), value


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    named = st.builds(lambda properties: {"type": "object", "properties": properties}, properties)
    parts = st.lists(named, min_size=1, max_size=2)
    return st.one_of(
        named,
        st.builds(lambda parts: {"allOf": parts}, parts),
        st.builds(lambda whole, parts: {**whole, "allOf": parts}, named, parts),
        st.builds(lambda whole, parts: {**whole, "anyOf": parts}, named, parts),
        st.builds(lambda whole: {**whole, "$ref": "#/$defs/shared"}, named),
        st.just({"$ref": "#/$defs/shared"}),
        st.just({"type": "object"}),
        st.builds(lambda whole: {**whole, "additionalProperties": True}, named),
    )


SCHEMAS = st.recursive(st.just({"type": "integer"}), objects, max_leaves=6)
VALUES = st.recursive(st.just(1), lambda inner: st.dictionaries(st.sampled_from(NAMES + "z"), inner), max_leaves=6)


def is_valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def unevaluated(schema: Any, *, is_part: bool = False) -> Any:
    """The same with `unevaluatedProperties` at every whole object that names properties."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in ("properties", "$defs"):
        if key in schema:
            made[key] = {name: unevaluated(inner) for name, inner in schema[key].items()}
    if "allOf" in schema:
        made["allOf"] = [unevaluated(part, is_part=True) for part in schema["allOf"]]
    if "$ref" in schema and "properties" in schema:
        made["$ref"] = "#/$defs/open"
    parts = [schema, *schema.get("allOf", ())]
    is_open = any("additionalProperties" in part for part in parts)
    if not is_part and not is_open and any("properties" in part for part in parts):
        made["unevaluatedProperties"] = False
    return made


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, shared=objects(st.just({"type": "integer"})), value=VALUES)
def test_closed_schema_never_allows_what_schema_refuses(schema: Any, shared: Any, value: Any) -> None:
    whole = {**schema, "$defs": {"shared": shared if "$ref" not in shared else fields("c")}}
    if is_valid(value, closed_schema(whole)):
        assert is_valid(value, whole)


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS.filter(lambda schema: "anyOf" not in json.dumps(schema)), value=VALUES)
def test_closed_schema_equals_unevaluated_properties(schema: Any, value: Any) -> None:
    whole = {**schema, "$defs": {"shared": fields("c"), "open": fields("c")}}
    expected = {**unevaluated(whole), "$defs": {"shared": unevaluated(fields("c")), "open": fields("c")}}
    assert is_valid(value, closed_schema(whole)) == is_valid(value, expected)


@pytest.mark.parametrize("count", [40, 2000])
def test_closed_schema_of_repeating_parts_is_bounded(count: int) -> None:
    chain = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}] * 2, "required": [f"r{i}"]} for i in range(count)}
    schema = {"$ref": "#/$defs/p0", "$defs": {**chain, f"p{count}": fields("a")}}
    output = StructuredOutput(shape=Shape.JSON_SCHEMA, value=schema, param="field", disables_additional_properties=True)
    with pytest.raises(InvalidRequest, match=r"field: .*(too many parts|cannot be parsed)"):
        output.grammar()


def spellings(name: str, count: int) -> list[str]:
    """So many references to one definition."""
    return [
        "#/$defs/" + "".join(f"%{ord(c):02x}" if number >> bit & 1 else c for bit, c in enumerate(name))
        for number in range(count)
    ]


def test_closed_schema_copying_one_part_many_times_is_refused() -> None:
    part = {"type": "array", "prefixItems": [{"type": "string"}] * 3000}
    copies = [{"type": "array", "$ref": reference} for reference in spellings("definition", 1000)]
    schema = {"type": "array", "prefixItems": copies, "$defs": {"definition": part}}
    with pytest.raises(ValueError, match="too many parts"):
        closed_schema(schema)


def test_closed_schema_of_alternatives_with_many_names_is_refused() -> None:
    alternatives = [{"minProperties": 1}] * 3000
    schema = {"properties": {f"p{i}": {} for i in range(3000)}, "anyOf": alternatives}
    with pytest.raises(ValueError, match="too many parts"):
        closed_schema(schema)


def test_schema_too_long_is_refused_before_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured_output, "closed_schema", lambda _: pytest.fail("it was closed"))
    schema = {"type": "object", "properties": {f"property-{i}": {"type": "string"} for i in range(20_000)}}
    output = StructuredOutput(shape=Shape.JSON_SCHEMA, value=schema, param="field", disables_additional_properties=True)
    with pytest.raises(InvalidRequest, match="field: more than 262144 characters"):
        output.grammar()


def test_tool_parameters_share_one_bound_of_parts() -> None:
    chain = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}] * 2} for i in range(9)}
    parameters = {"$ref": "#/$defs/p0", "allOf": [], "$defs": {**chain, "p9": fields("a")}}

    def grammar(num_tools: int) -> str:
        tools = tuple(ToolDefinition(name=f"tool_{i}", parameters=parameters) for i in range(num_tools))
        return CallGrammar(HERMES.form, {}).calls_only(ToolUse(tools=tools, must_call=True))

    assert "args_0" in grammar(1)
    with pytest.raises(InvalidRequest, match="tools: their parameters have too many parts"):
        grammar(16)


def test_closed_schema_nested_in_alternatives_is_walked_once() -> None:
    schema: Any = fields("a")
    for _ in range(40):
        schema = {"anyOf": [schema]}
    assert json.dumps(closed_schema(schema)).count("additionalProperties") == 1


def test_tool_parameters_are_closed_even_if_empty(tokens: Any) -> None:
    tools = (
        ToolDefinition(name="paint", parameters=fields(properties={"colour": {"enum": ["red", "blue"]}})),
        ToolDefinition(name="now", parameters={"type": "object"}),
    )
    lark = CallGrammar(HERMES.form, {}).calls_only(ToolUse(tools=tools, must_call=True))
    grammar = StructuredOutput(shape=Shape.LARK, value=lark, param="tools").grammar()

    def is_allowed(name: str, arguments: str) -> bool:
        form = HERMES.form
        call = form.before.replace("\ue000", name) + arguments + form.after
        return follows(tokens, grammar, form.open + call + form.close)

    assert is_allowed("paint", '{"colour":"red"}')
    assert not is_allowed("paint", '{"colour":"red","size":1}')
    assert is_allowed("now", "{}")
    assert not is_allowed("now", '{"a":1}')
