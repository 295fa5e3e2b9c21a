"""The best of several choices, and the majority vote."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api.request.choice_selection import elect, likeliest
from router.sandbox.pattern_search import PatternSearch
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, Overloaded
from tandem.values.outputs import SampledToken
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of
from tests.support.router.servers.several_answers import TEXTS, Various, size_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    made = fakes.make_servers(tokenizer)
    made.generator = Various()
    made.generator.tokenizer = tokenizer
    return made


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


async def ask(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_best_of_shows_likeliest_and_counts_all(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    answer = await ask(client, PLAIN, prompt=[[5, 6], [7]], n=3, best_of=5, prompt_logprobs=0)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[:3] == texts[3:] == [TEXTS[1], TEXTS[3], TEXTS[2]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * size_of(parts.tokenizer)
    assert [request.num_choices for request in parts.generator.requests] == [5, 5]
    logprobs = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(places) for places in logprobs] == [2, 2, 2, 1, 1, 1]
    chat = await ask(client, CHAT, **HELLO, best_of=2, logprobs=True)
    (choice,) = chat["choices"]
    assert choice["message"]["content"] == TEXTS[1]
    assert choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("n", "more", "text", "vote"),
    [
        (5, {}, TEXTS[0], {"answer": "it is 5", "votes": 1, "of": 5}),
        (5, {"vote_pattern": r"\d"}, TEXTS[0], {"answer": "5", "votes": 2, "of": 5}),
        (2, {"vote_pattern": r"so: (\d)"}, TEXTS[1], {"answer": "7", "votes": 1, "of": 2}),
        (3, {"vote_pattern": "z"}, TEXTS[0], {"answer": None, "votes": 0, "of": 3}),
        (1, {}, TEXTS[0], {"answer": "it is 5", "votes": 1, "of": 1}),
    ],
)
async def test_vote_shows_most_common_answer(
    client: httpx.AsyncClient, n: int, more: dict[str, Any], text: str, vote: dict[str, Any]
) -> None:
    answer = await ask(client, CHAT, **HELLO, n=n, vote=True, **more)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["message"]["content"], choice["vote"]) == (0, text, vote)
    answer = await ask(client, PLAIN, prompt=["a", "b"], n=n, vote=True, **more)
    assert [(one["index"], one["text"], one["vote"]) for one in answer["choices"]] == [(0, text, vote), (1, text, vote)]


async def test_vote_with_tools_is_refused(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    refused = await client.post(CHAT, json=HELLO | {"tools": [tool], "n": 2, "vote": True})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "vote")


def test_elect_tie_is_won_by_first() -> None:
    assert elect(["a", "b", "b", None]) == (1, "b", 2)
    assert elect([None, "b", "a", "a", "b"]) == (1, "b", 2)
    assert elect([None, None]) == (0, None, 0)


def test_likeliest_keeps_order_of_ties() -> None:
    choices = [(SampledToken(token_id=1, logprob=value),) for value in (-2.0, -1.0, -1.0)]
    assert likeliest(choices, 3) == [1, 2, 0]


async def test_vote_pattern_without_end_is_killed() -> None:
    search = PatternSearch(most_s=0.5)
    with pytest.raises(InvalidRequest, match="vote_pattern"):
        await search.find("(a+)+b", ["a" * 40], "vote_pattern", "acme")
    assert await PatternSearch().find("b|(c)", ["ab", "c", "d"], "vote_pattern", "acme") == [None, "c", None]


async def test_vote_pattern_slow_to_compile_is_refused() -> None:
    costly = "(?i)" + "[\x00-\U0010fff0]" * 100
    with pytest.raises(InvalidRequest, match="vote_pattern"):
        await PatternSearch(most_s=0.3).check(costly, "vote_pattern", "acme")
    with pytest.raises(InvalidRequest, match="unterminated"):
        await PatternSearch().check("(", "vote_pattern", "acme")
    with pytest.raises(InvalidRequest, match="1 to 512"):
        await PatternSearch().check("a" * 513, "vote_pattern", "acme")


async def test_pattern_search_without_turn_is_overloaded() -> None:
    search = PatternSearch(most_s=5.0, most_wait_s=0.05)
    slow = [asyncio.create_task(search.find("(a+)+b", ["a" * 40], "vote_pattern", tenant)) for tenant in "bc"]
    while not search._turns.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await search.find("a", ["a"], "vote_pattern", "acme")
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await search.find("a", ["a"], "vote_pattern", "acme") == ["a"]


async def test_slow_vote_patterns_delay_no_other_tenant() -> None:
    search = PatternSearch(most_s=60.0)
    text = ["a" * 40]
    slow = [asyncio.create_task(search.find("(a+)+b", text, "vote_pattern", "acme")) for _ in range(4)]
    try:
        await asyncio.sleep(0)
        assert await search.find("a", ["xa"], "vote_pattern", "other-company") == ["a"]
        assert not any(task.done() for task in slow)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_pattern_search_failed_process_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = asyncio.create_subprocess_exec, [True, True, False, *[True] * 3]

    async def start(*command: str, **pipes: Any) -> Any:
        return await (real("/bin/false", **pipes) if broken.pop(0) else real(*command, **pipes))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    assert await PatternSearch().find("b", ["ab"], "vote_pattern", "acme") == ["b"]
    with pytest.raises(Overloaded):
        await PatternSearch().find("b", ["ab"], "vote_pattern", "acme")
