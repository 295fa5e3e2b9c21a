"""`suffix`: text after the answer, for models whose tokenizer has marks for it."""

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from router.api.prompts import FillMarks, fill_marks
from router.text.tokenizer import Tokenizer
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import PLAIN, client_of, error_of

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def filling_servers() -> fakes.Servers:
    library = Library.from_str(fakes.byte_level_spec())
    library.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return fakes.make_servers(Tokenizer(library.to_str(), None))


def test_fill_marks_need_all_three_tokens() -> None:
    ids = {mark: 10 + number for number, mark in enumerate(MARKS)}
    assert fill_marks(ids) == FillMarks(10, 11, 12)
    assert fill_marks({mark: ids[mark] for mark in MARKS[:2]}) is None
    assert FillMarks(1, 2, 3).prompt([7, 8], [9]) == [1, 7, 8, 2, 9, 3]


@pytest.mark.parametrize("before", ["hello ", ""])
async def test_suffix_prompt_puts_answer_between_texts(before: str) -> None:
    parts = filling_servers()
    parts.say("hello")
    async with client_of(parts) as client:
        answer = await client.post(PLAIN, json={"prompt": before, "suffix": " <|fim_middle|> world"})
        assert answer.json()["choices"][0]["text"] == "hello"
        ids = parts.tokenizer.encode(before)
        assert (await client.post(PLAIN, json={"prompt": ids or [5], "suffix": " world"})).status_code == 200
    tokenizer, (first, second) = parts.tokenizer, parts.generator.requests
    prefix, suffix, middle = (tokenizer.added_ids[mark] for mark in MARKS)
    after = tokenizer.encode(" <|fim_middle|> world")
    assert list(first.prompt_token_ids) == [prefix, *ids, suffix, *after, middle]
    assert first.prompt_token_ids.count(middle) == 1, "what a client writes is text"
    assert list(second.prompt_token_ids) == [prefix, *(ids or [5]), suffix, *tokenizer.encode(" world"), middle]


@pytest.mark.parametrize(
    ("change", "can_fill"),
    [({}, False), ({"echo": True}, True), ({"truncate_prompt_tokens": 5}, True)],
)
async def test_suffix_invalid_request_is_refused(change: dict[str, Any], can_fill: bool) -> None:
    parts = filling_servers() if can_fill else fakes.make_servers(fakes.make_tokenizer())
    async with client_of(parts) as client:
        answer = await client.post(PLAIN, json={"prompt": "a", "suffix": "b"} | change)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "suffix")
    assert not parts.generator.requests
