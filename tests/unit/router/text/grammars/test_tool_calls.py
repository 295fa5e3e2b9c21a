"""Text that a call grammar allows parses as calls whose arguments obey the schema."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import numpy as np
import pytest

from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.grammars.tool_calls import CallGrammar
from router.text.tool_parsers.events import CallArguments, CallBegan, TextContent
from router.text.tool_parsers.families import Family, family_of
from router.text.tools import ToolDefinition, ToolUse
from tandem.model_path import model_directory
from tests.support.router.servers.tool_calls import FAMILIES

VOCABULARY, END = 2048, 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b<tool_call>", "]}"]},
        "next": {"$ref": "#/$defs/leaf"},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"lenient": True},
    "$defs": {"leaf": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}},
    "description": 'says "::=" and </tool_call>',
}
PERSON["$defs"]["leaf"]["additionalProperties"] = False  # type: ignore[index]
TOOLS = (ToolDefinition(name="person", parameters=PERSON, strict=True), ToolDefinition(name="now-1"))
SIGNS = [("", name) for name in FAMILIES] + [
    ("[TOOL_CALLS] [ARGS]", "mistral"),
    ("<｜tool▁call▁begin｜> ```json", "deepseek"),
]


@pytest.fixture(scope="module")
def tokens() -> Any:
    text = (model_directory("builtin") / "tokenizer.json").read_text()
    return llguidance.LLTokenizer(text, n_vocab=VOCABULARY, eos_token=[END])


def family(signs: tuple[str, str]) -> Family:
    found = family_of(*signs)
    assert found is not None
    return found


def matcher(tokens: Any, lark: str) -> Any:
    grammar = StructuredOutput(shape=Shape.LARK, value=lark, param="tools").grammar()
    made = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def drawn(tokens: Any, lark: str, rng: random.Random) -> str:
    """An answer of random tokens among the allowed ones, ended as soon as that is allowed."""
    follow, ids = matcher(tokens, lark), list[int]()
    while not follow.is_stopped():
        mask = llguidance.numpy.allocate_token_bitmask(1, VOCABULARY)
        llguidance.numpy.fill_next_token_bitmask(follow, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = END if END in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        assert follow.consume_token(token)
        ids += [token] if token != END else []
    return str(tokens.decode_str(ids))


def read(which: Family, text: str) -> tuple[str, list[list[str]]]:
    parser = which.parser(TOOLS, is_forced=True)
    content, calls = "", list[list[str]]()
    for event in [*parser.feed(text), *parser.flush()]:
        match event:
            case TextContent():
                content += event.text
            case CallBegan():
                calls.append([event.name, ""])
            case CallArguments():
                calls[-1][1] += event.text
    assert not parser.is_open
    return content, calls


def validate(calls: list[list[str]]) -> None:
    schemas = {tool.name: tool.schema for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("parallel", [True, False])
def test_call_grammar_forced_answers_are_valid_calls(tokens: Any, signs: tuple[str, str], parallel: bool) -> None:
    which, rng, counts = family(signs), random.Random(1), set[int]()
    lark = CallGrammar(which.form, {}).calls_only(ToolUse(tools=TOOLS, must_call=True, parallel=parallel))
    for _ in range(12):
        content, calls = read(which, drawn(tokens, lark, rng))
        assert content == ""
        validate(calls)
        counts.add(len(calls))
    assert counts == {1} if not parallel else max(counts) > 1


@pytest.mark.parametrize("signs", SIGNS)
def test_call_grammar_calls_within_text_obey_schemas(tokens: Any, signs: tuple[str, str]) -> None:
    which = family(signs)
    use = ToolUse(tools=TOOLS)
    call = which.form.before.replace("\ue000", "person") + '{"name":"x","kind":"a"}' + which.form.after
    good = which.form.open + call + which.form.close
    # Where a call stands in place of an answer there is none behind a text.
    behind = [f"Hm.\n{good}\n so {good}"] if which.form.trigger else []
    for text in ["", "hello", "a < b [c] {d}", good, *behind]:
        follow = matcher(tokens, CallGrammar(which.form, {}).with_text(use))
        assert follow.try_consume_tokens(ids := tokens.tokenize_str(text)) == len(ids)
        assert follow.is_accepting()
        calls = read(which, text)[1]
        validate(calls)
        assert len(calls) == text.count('"kind"')
    for bad in (good.replace('"a"', '"c"'), good.replace("person", "nobody"), good.replace(',"kind":"a"', "")):
        follow = matcher(tokens, CallGrammar(which.form, {}).with_text(use))
        ids = tokens.tokenize_str(bad)
        assert follow.try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("token", [False, True])
def test_call_grammar_text_never_parses_as_call(tokens: Any, signs: tuple[str, str], token: bool) -> None:
    """Also where a marker is a token of its own: spelled out it would be parsed as well."""
    which = family(signs)
    ids = {which.form.trigger: 5} if token and which.form.trigger else {}
    lark = CallGrammar(which.form, ids).with_text(ToolUse(tools=TOOLS))
    for start in filter(None, (which.form.trigger, *which.form.starts)):
        for text in (f"so {start} free", f"{start}free", f"so {start}"):
            follow, spelled = matcher(tokens, lark), tokens.tokenize_str(text)
            is_taken = follow.try_consume_tokens(spelled) == len(spelled) and follow.is_accepting()
            assert not is_taken


def test_call_grammar_marker_tokens_are_single_tokens(tokens: Any) -> None:
    grammar = CallGrammar(family(("", "hermes")).form, {"<tool_call>": 5, "</tool_call>": 4})
    inside = tokens.tokenize_str('\n{"name": "now-1", "arguments": {}}\n')
    for lark in (grammar.calls_only(ToolUse(tools=TOOLS)), grammar.with_text(ToolUse(tools=TOOLS))):
        follow = matcher(tokens, lark)
        assert follow.try_consume_tokens([5, *inside, 4]) == len(inside) + 2
        assert follow.is_accepting()
    spelled = tokens.tokenize_str("<tool_call>")
    assert matcher(tokens, grammar.calls_only(ToolUse(tools=TOOLS))).try_consume_tokens(spelled) == 0


def test_call_grammar_allows_calls_or_schema_answer(tokens: Any) -> None:
    which = family(("", "hermes"))
    lark = CallGrammar(which.form, {}).calls_only(ToolUse(tools=TOOLS), {"type": "integer"})
    for text, is_taken in (("42", True), ("hello", False), ("<tool_call>\n", True)):
        follow = matcher(tokens, lark)
        ids = tokens.tokenize_str(text)
        assert (follow.try_consume_tokens(ids) == len(ids)) is is_taken


def test_call_grammar_unsupported_keyword_is_an_error(tokens: Any) -> None:
    tool = ToolDefinition(
        name="f",
        parameters={"properties": {"x": {"type": "array", "uniqueItems": True}}, "x-guidance": {"lenient": True}},
    )
    lark = CallGrammar(family(("", "hermes")).form, {}).calls_only(ToolUse(tools=(tool,), must_call=True))
    grammar = StructuredOutput(shape=Shape.LARK, value=lark, param="tools").grammar()
    assert "uniqueItems" in llguidance.LLMatcher(tokens, grammar, log_level=0).get_error()
