"""Structured answers behind reasoning: a grammar lets a model think first, for any reasoning marks."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from engine.sampling.grammar import LlGuides
from engine.types.token_guide import follow, num_words
from router.text.chat_template import ChatTemplate
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.grammars.thinking import ThinkingSupport, with_thinking
from router.text.grammars.tool_calls import CallGrammar
from router.text.reasoning import FAMILIES, ReasoningParser, ThinkingMarks
from router.text.tokenizer import Tokenizer
from router.text.tool_parsers.families import HERMES
from router.text.tools import ToolDefinition, ToolUse
from tandem.errors import InvalidRequest
from tests.support.router.servers import fakes

THINK = FAMILIES["think"]
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
USE = ToolUse(tools=(ToolDefinition(name="add", parameters=PERSON, strict=True),))
ANSWER, CALL = '{"a":4}', '<tool_call>\n{"name": "add", "arguments": {"a":4}}\n</tool_call>'
BOUND = 400


def spec_of(marks: ThinkingMarks | None, *, special: bool) -> str:
    """`marks`: those that are single tokens."""
    library = Library.from_str(fakes.byte_level_spec())
    library.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks or ()])
    return str(library.to_str())


class Follower:
    """A grammar, followed as a worker does it."""

    def __init__(self, spec: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(spec)
        self.tokenizer = Tokenizer(spec, ChatTemplate("{{ messages }}</think>", {}))
        self.marks = {mark: i for mark, i in self.tokenizer.added_ids.items() if mark in THINK}
        self.library = Library.from_str(spec)
        ends = [fakes.END]
        self._guides = LlGuides(
            folder / "tokenizer.json", vocab_size=self.tokenizer.size, eos_token_ids=ends, cache_bytes=1 << 30
        )

    def takes(self, grammar: str, text: str) -> bool:
        ids = self.library.encode(text, add_special_tokens=False).ids
        return follow(self._guides.guide(grammar), [*ids, fakes.END])

    def drawn(self, grammar: str, rng: random.Random, thought: Sequence[int]) -> str:
        """Reasoning tokens, followed by random allowed ones."""
        guide, ids = self._guides.guide(grammar), list(thought)
        assert follow(guide, ids)
        while not guide.is_over:
            bits = np.zeros(num_words(self.tokenizer.size), dtype=np.int32)
            guide.allow(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            ids.append(fakes.END if fakes.END in allowed else int(rng.choice(allowed)))
            assert guide.accept(ids[-1])
            assert len(ids) < BOUND
        return self.tokenizer.decode([i for i in ids if i != fakes.END], skip_special_tokens=False)


@pytest.fixture(scope="module", params=["text", "added", "special"])
def follower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Follower:
    marks = None if request.param == "text" else THINK
    return Follower(spec_of(marks, special=request.param == "special"), tmp_path_factory.mktemp(request.param))


def grammar_of(shape: Shape, value: Any) -> str:
    return StructuredOutput(shape=shape, value=value, param="x").grammar()


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (Shape.JSON_SCHEMA, PERSON),
        (Shape.REGEX, r'\{"a":\d\}'),
        (Shape.CHOICE, [ANSWER, "no"]),
        (Shape.LARK, 'start: "{" answer "}"\nanswer: /"a":[0-9]/'),
        (Shape.LARK, CallGrammar(HERMES.form, {}, THINK.begin).calls_only(USE, PERSON)),
    ],
    ids=lambda value: value.value if isinstance(value, Shape) else "",
)
def test_grammar_with_thinking_allows_structure_after_it(follower: Follower, shape: Shape, value: Any) -> None:
    grammar, thought = grammar_of(shape, value), "so </thi {4} <tool_call> 😀\n"
    opened, begins = (with_thinking(grammar, THINK, follower.marks, is_open=is_open) for is_open in (True, False))
    for gap in ("", "\n\n"):
        assert follower.takes(opened, f"{thought}</think>{gap}{ANSWER}")
        assert follower.takes(begins, f"<think>{thought}</think>{gap}{ANSWER}")
    assert follower.takes(begins, ANSWER)
    for wrong in (ANSWER, thought, f"{thought}</think>", f"{thought}</think>x", f"{thought}</think>\n\n\n\n\n{ANSWER}"):
        assert not follower.takes(opened, wrong)
        assert not follower.takes(begins, f"<think>{wrong}")


def test_grammar_with_thinking_samples_parse_back(follower: Follower) -> None:
    rng = random.Random(1)
    ends = [*follower.tokenizer.encode("yes"), *follower.library.encode("</think>").ids]
    for is_open in (True, False):
        grammar = with_thinking(grammar_of(Shape.JSON_SCHEMA, PERSON), THINK, follower.marks, is_open=is_open)
        begin = [] if is_open else follower.library.encode("<think>").ids
        for _ in range(8):
            parser = ReasoningParser(THINK, is_open=is_open)
            parts = parser.feed(follower.drawn(grammar, rng, [*begin, *ends]))
            answer = "".join(part.text for part in parts if not part.is_reasoning)
            assert json.loads(answer).keys() == {"a"}
            assert "".join(part.text for part in parts if part.is_reasoning) == "yes"


def test_strict_calls_with_text_follow_the_reasoning(follower: Follower) -> None:
    grammar = grammar_of(Shape.LARK, CallGrammar(HERMES.form, {}, THINK.begin).with_text(USE))
    begins = with_thinking(grammar, THINK, follower.marks, is_open=False)
    mentioned = '<think>a <tool_call> of {"b"}?</think>'
    for answer in ("It is four.", CALL, f"I add. {CALL}"):
        assert follower.takes(begins, answer)
        assert follower.takes(begins, f"{mentioned}\n{answer}")
    for wrong in (mentioned.removesuffix("</think>"), f"<think>{CALL}", f"{mentioned}{CALL.replace('4', 'x')}"):
        assert not follower.takes(begins, wrong)


@pytest.mark.parametrize(
    ("tail", "begins_turn", "kinds"),
    [
        ("<think>\n", True, (True, False)),
        ("<think>\n", False, (True, False)),
        ("", True, (False, True)),
        ("", False, (False, False)),
        ("<think>\n\n</think>\n\n", True, (False, False)),
    ],
)
def test_thinking_support_detects_open_reasoning(
    follower: Follower, tail: str, begins_turn: bool, kinds: tuple[bool, bool]
) -> None:
    thinking = ThinkingSupport(follower.tokenizer)
    prompt = follower.library.encode(f"what?{tail}").ids
    reasoning = thinking.reasoning(prompt, begins_turn=begins_turn)
    assert reasoning is not None
    assert (reasoning.is_open, reasoning.may_begin) == kinds
    grammar = grammar_of(Shape.JSON_OBJECT, None)
    assert (thinking.before(grammar, reasoning) == grammar) is not any(kinds)
    assert thinking.before(grammar, None) == grammar


@pytest.mark.parametrize("grammar", ["[]", "{}", '{"grammars": []}', '{"grammars": [1]}'])
def test_grammar_with_thinking_other_form_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        with_thinking(grammar, THINK, {}, is_open=True)
