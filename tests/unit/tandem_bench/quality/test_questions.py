"""Questions of the quality suites: where needles lie, what counts as right, how prompts are made."""

import json
from collections.abc import Sequence
from random import Random

import pytest

from router.text.tokenizer import Tokenizer
from tandem.model_path import BUILTIN, model_directory
from tandem_bench.make_model import make_tokenizer
from tandem_bench.quality.json_requests import JsonRequest, draw_json_request
from tandem_bench.quality.questions import DEPTHS, json_questions, needle_question, needle_questions
from tandem_bench.quality.text_scores import WINDOW, prompt_beginning, story_windows, text_windows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_directory(BUILTIN))


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    """One without a chat template."""
    return Tokenizer(make_tokenizer(4096).to_str(), None)


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.mark.parametrize("depth", DEPTHS)
def test_needle_lies_at_its_depth(depth: int) -> None:
    question = needle_question(Random(1), 1000, depth, words)
    key = question.text.rpartition("What is the code of ")[2].rstrip("?")
    place = question.text.index(f"The code of {key} is")
    assert 100 * place / question.beginning.rindex("The code of") == pytest.approx(depth, abs=5)
    assert question.text.count("The code of") == 6


def test_needles_take_every_depth_in_turn() -> None:
    found = [question.depth for question in needle_questions(7, 256, words)]
    assert found == [*DEPTHS, *DEPTHS[:2]]


@pytest.mark.parametrize("length", [256, 1024])
def test_needle_prompt_and_answer_fit_the_length(length: int, tokenizer: Tokenizer) -> None:
    def count(texts: Sequence[str]) -> list[int]:
        return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    for question in needle_questions(5, length, count):
        assert length - 128 < len(question.prompt(tokenizer)) + question.max_tokens <= length


def test_needle_is_right_only_if_its_value_comes_first() -> None:
    question = needle_question(Random(1), 256, 0, words)
    value = question.text.split(" is ")[1][:4]
    assert question.is_right(value)
    assert question.is_right(f" It is {value}.")
    assert not question.is_right(f"1 {value}")
    assert not question.is_right(f"{value}0")
    assert not question.is_right("")


def test_questions_are_the_same_in_every_run() -> None:
    for made in (lambda: needle_questions(3, 256, words), lambda: json_questions(3)):
        assert [one.text for one in made()] == [one.text for one in made()]


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('{"age": 1, "active": true}', True),
        ('Sure:\n```json\n{"active": true, "age": 1}\n```', True),
        ('{"age": 1, "active": 1}', False),
        ('{"age": "1", "active": true}', False),
        ('{"age": 1}', False),
        ('{"age": 1, "active": true', False),
        ("[" * 100_000 + "{" * 3, False),
        ('{"a":' * 100_000, False),
        ("no object", False),
        ("", False),
    ],
)
def test_json_request_is_answered_by_the_object_alone(answer: str, is_right: bool) -> None:
    assert JsonRequest(text="", record={"age": 1, "active": True}).is_answered_by(answer) is is_right


def test_json_request_is_answered_by_its_own_record() -> None:
    for seed in range(50):
        request = draw_json_request(Random(seed))
        assert request.is_answered_by(json.dumps(request.record))


def test_prompt_without_chat_template_is_continued(plain_tokenizer: Tokenizer) -> None:
    question = needle_question(Random(1), 256, 0, words)
    assert plain_tokenizer.decode(question.prompt(plain_tokenizer)) == question.beginning
    assert question.beginning.endswith(" is")


def test_text_windows_are_few_full_and_evenly_spaced(plain_tokenizer: Tokenizer) -> None:
    ids = list(range(300, 300 + 10 * WINDOW))
    found = text_windows(plain_tokenizer, ids, 5)
    assert found == [ids[i * WINDOW : (i + 1) * WINDOW] for i in (0, 2, 4, 6, 8)]
    assert len(text_windows(plain_tokenizer, ids, 99)) == 10
    assert text_windows(plain_tokenizer, [7], 5) == []


def test_windows_begin_as_the_tokenizer_begins_prompts() -> None:
    from tokenizers.processors import TemplateProcessing

    library = make_tokenizer(4096)
    library.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer = Tokenizer(library.to_str(), None)
    assert prompt_beginning(tokenizer) == [0]
    for windows in (story_windows(tokenizer, 2), text_windows(tokenizer, range(300, 2000), 2)):
        assert all(window[0] == 0 and len(window) == WINDOW and 0 not in window[1:] for window in windows)
