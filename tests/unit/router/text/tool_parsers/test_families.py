"""Tool call parsers: their results, independently of how the text is split."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.tool_parsers.events import CallArguments, CallBegan, TextContent, ToolEvent
from router.text.tool_parsers.families import family_of
from router.text.tool_parsers.text_machine import MAX_HEAD_CHARS
from router.text.tools import ToolDefinition
from tests.support.router.kept_objects import collecting
from tests.support.router.servers.tool_calls import FAMILIES

WEATHER = ToolDefinition(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {}, "opts": {"type": "object"}},
    },
)
CLOCK = ToolDefinition(name="clock")
TOOLS = (WEATHER, CLOCK)

Found = tuple[str, list[tuple[str, str]]]


def merged(events: Sequence[ToolEvent]) -> list[ToolEvent]:
    """With adjacent continuations joined."""
    out: list[ToolEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextContent) and isinstance(last, TextContent):
            out[-1] = TextContent(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.call == event.call:
            out[-1] = CallArguments(event.call, last.text + event.text)
        else:
            out.append(event)
    return out


def parse(family: str, *pieces: str, flush: bool = True) -> list[ToolEvent]:
    found = family_of("", family)
    assert found is not None
    parser = found.parser(TOOLS, is_forced=False)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.flush()] if flush else events)


def read(family: str, text: str) -> Found:
    content, calls = "", list[tuple[str, str]]()
    for event in parse(family, text):
        match event:
            case TextContent():
                content += event.text
            case CallBegan():
                assert event.call == len(calls)
                calls.append((event.name, ""))
            case CallArguments():
                assert event.call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, calls


PARIS = '{"city": "Paris"}'
ONE = [("get_weather", PARIS)]
TWO = [("get_weather", PARIS), ("clock", "{}")]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'
    "<｜tool▁call▁end｜>{}<｜tool▁calls▁end｜>"
)
V3_CLOCK = "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


CALLS: list[tuple[str, str, Found]] = [
    ("hermes", HERMES, ("", ONE)),
    ("hermes", f"Let me see.\n\n{HERMES}\n", ("Let me see.", ONE)),
    ("hermes", f'{HERMES}\n<tool_call>{{"name": "clock"}}</tool_call>', ("", TWO)),
    ("hermes", f"{HERMES} and then", (" and then", ONE)),
    ("hermes", HERMES[: -len("all>")], ("", ONE)),
    ("hermes", HERMES[: -len("/tool_call>")], ("", ONE)),
    ("hermes", "a </tool_c", ("a </tool_c", [])),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}', ("", ONE)),
    ("hermes", r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>', ("", ONE)),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', ("", [("clock", "{}")])),
    ("hermes", f"<tool_call>\n{XML}", ("<tool_call>", ONE)),
    ("hermes", f"<tool_call>{HERMES}", ("<tool_call>", ONE)),
    ("hermes", XML, ("", ONE)),
    ("qwen3_coder", HERMES, ("", ONE)),
    (
        "qwen3_coder",
        "I look.\n<function=get_weather><parameter=city>\n\n7 > 5\n</parameter><parameter=days>3</parameter>\n"
        '<parameter=at>soon</parameter><parameter=opts>{"a": [1]}</parameter></function>',
        ("I look.", [("get_weather", '{"city": "\\n7 > 5", "days": 3, "at": "soon", "opts": {"a": [1]}}')]),
    ),
    ("qwen3_coder", "<function=clock>\n</function>", ("", [("clock", "{}")])),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', ("", ONE)),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"arguments": {PARIS}, "name": "get_weather"}}, {{"name": "clock", "arguments": {{}}}}]',
        ("", TWO),
    ),
    ("mistral", f"Well [TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]clock{{}}", ("Well", TWO)),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{PARIS}", ("", ONE)),
    ("llama3", LLAMA, ("", ONE)),
    ("llama3", f'<|python_tag|>{{"type": "function", {LLAMA[1:]}', ("", ONE)),
    ("llama3", f'{LLAMA}; {{"name": "clock", "parameters": {{}}}}', ("", TWO)),
    ("deepseek", V3.replace("{}", ""), ("", ONE)),
    ("deepseek", f"Hm.{V3.replace('{}', V3_CLOCK)}", ("Hm.", TWO)),
    ("deepseek", V31, ("", TWO)),
    ("pythonic", "[get_weather(city='Paris')]", ("", ONE)),
    ("pythonic", '[get_weather(city="Paris"), clock()]', ("", TWO)),
    (
        "pythonic",
        "[get_weather(city='a\\'),(', opts={'x': [1, None, True]}, days=-2)]",
        ("", [("get_weather", '{"city": "a\'),(", "opts": {"x": [1, null, true]}, "days": -2}')]),
    ),
]


@pytest.mark.parametrize(("family", "text", "expected"), CALLS)
def test_tool_parser_finds_calls_of_every_family(family: str, text: str, expected: Found) -> None:
    assert read(family, text) == expected
    for _name, arguments in expected[1]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "a < b, and <tool_ is no tag \n"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "clock", "more": 1'),
        ("hermes", "<tool_call>see below</tool_call>\n\n"),
        ("hermes", "<tool_call> <func"),
        ("hermes", '{"name": "clock", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": [1]}'),
        ("qwen3_coder", "<function=unknown></function>"),
        ("qwen3_coder", "<function=" + "x" * 2 * MAX_HEAD_CHARS + ">"),
        ("mistral", "[TOOL_CALLS] is how it begins"),
        ("mistral", "[TOOL_CALLS]unknown{}"),
        ("mistral", "[TOOL_CALLS]clock" + " " * 2 * MAX_HEAD_CHARS + "{}"),
        ("llama3", '  {"answer": 42}\n'),
        ("llama3", '{"name": "Ann", "parameters": {}}'),
        ("llama3", 'See {"name": "clock", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[get_weather('Paris')]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[clock(a=" + "(" * 300 + ")" * 300 + ")]"),
        ("pythonic", "[clock(a=1 + 1), clock()]"),
        ("pythonic", "[clock(a=1e999)]"),
    ],
)
def test_tool_parser_text_without_call_is_unchanged(family: str, text: str) -> None:
    assert read(family, text) == (text, [])


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, text, _ in CALLS])
def test_tool_parser_leaves_no_cycles_wherever_an_answer_ends(family: str, text: str) -> None:
    parse(family, text)  # what is made once
    with collecting() as found:
        for end in range(len(text)):
            parse(family, text[:end], flush=False)
    assert not found


def test_tool_parser_streams_arguments_as_written() -> None:
    """None waits for the call's end; no part of a call becomes text."""
    pieces = list(HERMES)
    for end in range(len(pieces) + 1):
        events = parse("hermes", *pieces[:end], flush=False)
        at = HERMES.find(PARIS)
        shown = HERMES[at : min(end, at + len(PARIS))]
        expected: list[ToolEvent] = [CallBegan(0, "get_weather"), CallArguments(0, shown)] if shown else []
        assert events == expected


FRAGMENTS = [
    *HERMES.partition('"arguments"'), *XML.partition("<parameter=city>"), *LLAMA.partition("{"),
    *V3.replace("{}", V3_CLOCK).partition("function"), *V31.partition("clock"), "[TOOL_CALLS]", "[ARGS]", "[", "]",
    "get_weather", "clock", "{}", "{", "}", '"', "\\", ",", ":", " ", "\n", "(", ")", "=", "'", "1", "<", ">", "</",
    "<tool_call>", "</tool_call>", '{"name": "clock"', '"arguments": {"a": "<tool_call>"}', "<function=clock>",
    "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>", "; ", "[clock(", "a=1", ")]", "null", "é",
    "x" * 40, " " * MAX_HEAD_CHARS, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    data=st.data(),
)
def test_tool_parser_any_split_gives_the_same_calls(
    family: str, fragments: list[str], cuts: list[int], data: st.DataObject
) -> None:
    """After every prefix, not only at the end: a continued stream is parsed again from its beginning."""
    text = "".join(fragments)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    assert parse(family, *pieces) == parse(family, text) == parse(family, *text)
    content, calls = read(family, text)
    assert calls or content == text
    end = data.draw(st.integers(0, len(text)))
    assert parse(family, text[:end], flush=False) == parse(family, *text[:end], flush=False)


def test_tool_parser_long_text_takes_linear_time() -> None:
    """A quadratic parser would exceed the suite's time limit."""
    text = (' <tool_call> {"name": "x' * 6_000) + '{"' * 30_000
    for family in FAMILIES:
        assert read(family, text) == (text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", '<function=clock>\n<parameter=at>\n"\\ud83d"\n</parameter>\n</function>'),
        ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"at\\": \\"\\ud83d\\"}"}</tool_call>'),
        ("pythonic", '[clock(at="\\ud83d")]'),
    ],
)
def test_tool_parser_lone_surrogate_stays_encodable(family: str, text: str) -> None:
    """Models cut the escapes of emoji in two."""
    ((name, arguments),) = read(family, text)[1]
    assert name == "clock"
    assert arguments.encode().decode() == arguments
    assert json.loads(arguments) == {"at": "\ud83d"}


def test_tool_parser_unrepresentable_number_stays_text() -> None:
    text = "<function=clock>\n<parameter=at>\n1e999\n</parameter>\n</function>"
    assert read("qwen3_coder", text)[1] == [("clock", '{"at": "1e999"}')]
