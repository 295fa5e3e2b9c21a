"""Python-style calls: parsed as Python would, within bounds that Python lacks."""

import ast
import json
import math
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.tool_parsers.python_call import MAX_CALL_CHARS, MAX_DEPTH, MAX_VALUES, read_call

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.booleans() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)


def parse_with_ast(text: str) -> tuple[str, str] | None:
    """The call by `ast`, which has no bounds."""
    try:
        with warnings.catch_warnings(action="ignore"):
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return call.func.id, json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError):
        return None


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["city", "days", "_x", "größe"]), VALUES, max_size=4), st.sampled_from(["", " "])
)
def test_python_call_repr_of_values_is_parsed(arguments: dict[str, object], space: str) -> None:
    text = f"f{space}({space}" + ", ".join(f"{k}{space}={space}{v!r}" for k, v in arguments.items()) + f"{space})"
    assert read_call(text) == ("f", json.dumps(arguments, ensure_ascii=False))


PIECES = st.sampled_from(
    [
        *"()[]{}=,:'\"\\ \n-+.0_1e",
        "a",
        "None",
        "True",
        "r'",
        '"""',
        "'''",
        "\\n",
        "\\x41",
        "\\N{DASH}",
        "0x1f",
        "1j",
        "b''",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
@example("'a' \"b\" r'\\n'")
@example('"""a"b\\"""""')
@example("'\\d\\u00e9\\101\\\n'")
@example("''''")
@example('""""')
@example("'' ''")
@example("1, True=2")
@example("(1,)")
@example("(1)")
@example("()")
@example("(,)")
@example("{1: 2, None: [3,],}")
@example("{[1]: 2}")
@example("{1, 2}")
@example("- 1")
@example("--1")
@example("1__0")
@example("012")
@example("1e999")
def test_python_call_agrees_with_ast(value: str) -> None:
    text = f"f(a={value})"
    found = read_call(text)
    if found is not None:
        assert found == parse_with_ast(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f()", {}),
        ("f(a=1,)", {"a": 1}),
        ("  f(\n  a='it''s', b=\"x\\ty\", c=r'\\d+', d='\\u00e9')  ", {"a": "its", "b": "x\ty", "c": "\\d+", "d": "é"}),
        (
            "f(a=(1, 2), b=(3), c=(), d={'k': [True, None, -1.5e3]})",
            dict(a=[1, 2], b=3, c=[], d={"k": [True, None, -1500.0]}),
        ),
        ("f(a='''two\nlines''', b='" + "\\n" * 400 + "')", {"a": "two\nlines", "b": "\n" * 400}),
        ("f(a=0x1f, b=1_000, c=.5, d=5.)", {"a": 31, "b": 1000, "c": 0.5, "d": 5.0}),
    ],
)
def test_python_call_valid_calls_are_parsed(text: str, arguments: dict[str, object]) -> None:
    assert read_call(text) == ("f", json.dumps(arguments, ensure_ascii=False)) == parse_with_ast(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "f", "f(", "f(1)", "f(a=1) b", "f(a=1)(b=2)", "f(a=1, a=2)", "f(a=x)", "f(a=1+1)", "f(**a)", "a.f()"),
        *("f(a=f'{x}')", "f(a=b'x')", "f(a='x)", "f(a='x\ny')", "f(a=1 b=2)", "f(a=[1 2])", "f(a=[)", "f(a=1j)"),
        *("f(a=1e999)", "f(a='\\N{no such}')"),
    ],
)
def test_python_call_other_text_is_rejected(text: str) -> None:
    assert read_call(text) is None


def test_python_call_beyond_bounds_is_rejected() -> None:
    """Each bound is reached by a valid call, and exceeded by one more."""

    def nested(depth: int) -> str:
        return "f(a=" + "[" * depth + "]" * depth + ")"

    def many(count: int) -> str:
        return "f(a=[" + "1," * count + "])"

    def long(count: int) -> str:
        return "f(a='" + "x" * (count - 7) + "')"

    for made, most in ((nested, MAX_DEPTH), (many, MAX_VALUES - 1), (long, MAX_CALL_CHARS)):
        assert read_call(made(most)) is not None
        assert read_call(made(most + 1)) is None
    assert read_call("f(a=" + "9" * 2000 + ")") is None
    assert read_call("f(a=[" + r"'\x41'," * (MAX_VALUES // 8) + "])") is None
    assert math.isfinite(float(json.loads((read_call("f(a=1e308)") or ("", ""))[1])["a"]))


@pytest.mark.parametrize(
    "what",
    [
        *(
            "-",
            "not ",
            "(",
            "[",
            "{",
            "f(",
            "lambda:",
            "1if 1else ",
            "x.",
            "'",
            '"""',
            "\\",
            "'\\",
            "1",
            "1_",
            "1.",
            " ",
        ),
        *("=", "\n", "1,", "'',"),
    ],
)
def test_python_call_repetition_takes_linear_time(what: str) -> None:
    """Python's own parser recurses on the C stack for some of these, or takes a tenth of a second."""
    text = "f(a=" + (what * MAX_CALL_CHARS)[: MAX_CALL_CHARS - 5] + ")"
    found = read_call(text)
    assert found is None


def test_python_call_keyword_as_argument_name_is_allowed():
    assert read_call('travel(from="Oslo", to="Bergen")') == ("travel", '{"from": "Oslo", "to": "Bergen"}')
