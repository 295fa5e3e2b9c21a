"""tandem.client: tool calls, prompt logprobs, variables, votes, cache marks; and streams that do not resume."""

import json
from array import array
from random import Random
from typing import Any

import pytest

from tandem.client.aio import AsyncClient
from tandem.client.answers import CallPart
from tandem.client.options import Options, Tool, ToolCall, ToolChoice, Turn
from tandem.client.progress import StreamProgress
from tandem.client.requests import generate_request
from tandem.client.sync import Client
from tandem.errors import InvalidRequest, Unavailable
from tandem.v1 import inference_pb2 as pb
from tandem.values.outputs import PredictionUse
from tests.support.router.servers import fakes
from tests.support.router.servers.tool_calls import CALLS
from tests.unit.tandem.client.test_client import HELLO, server_in_thread, server_of

CITY = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})
TOOLS = [Tool(name="weather", description="Of a place.", parameters=CITY), Tool(name="clock")]

__all__ = ["server_in_thread"]


@pytest.fixture
def parts() -> fakes.Servers:
    return fakes.make_servers(fakes.make_tokenizer(), grammars=fakes.AnyGrammar(), context=4096)


def test_options_tool_calls_continue_the_conversation(parts: fakes.Servers, server_in_thread: str) -> None:
    parts.say(CALLS)
    with Client(server_in_thread) as client:
        options = Options(tools=TOOLS, n=2)
        first, second = client.chat(HELLO, options).choices
        assert (first.text, first.finish_reason) == ("I look.", "tool_calls")
        assert [(call.name, json.loads(call.arguments)) for call in first.tool_calls] == [
            ("weather", {"city": "Köln 😀"}),
            ("clock", {}),
        ]
        assert len({call.id for choice in (first, second) for call in choice.tool_calls}) == 4
        parts_of_calls = [part for piece in client.stream_chat(HELLO, options) for part in piece.tool_calls]
        begun = parts_of_calls[0]
        assert begun == CallPart(index=0, id=begun.id, name="weather", arguments=begun.arguments)
        assert {part.id for part in parts_of_calls if not part.name} == {""}
        result = Turn(role="tool", content="rain", tool_call_id=first.tool_calls[0].id)
        conversation = [*HELLO, first.turn(), result]
        client.chat(conversation, Options(tools=TOOLS, tool_choice=ToolChoice(mode="none")))
        prompt = parts.generator.requests[-1].prompt_token_ids
        assert '"city": "Köln 😀"' in parts.tokenizer.decode(prompt)
        ids = client.tokenize(conversation, tools=TOOLS)
        assert len(ids) > len(client.tokenize(conversation))


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ToolChoice(mode="required"), ["weather", "clock"]),
        (ToolChoice(function="clock"), ["clock"]),
        (ToolChoice(mode="required", allowed=["weather"]), ["weather"]),
    ],
)
async def test_options_tool_choice_limits_grammar(parts: fakes.Servers, choice: ToolChoice, names: list[str]) -> None:
    parts.say(CALLS)
    async with server_of(parts) as address, AsyncClient(address) as client:
        await client.chat(HELLO, Options(tools=TOOLS, tool_choice=choice))
    grammar = parts.generator.requests[0].sampling.grammar or ""
    assert [tool.name for tool in TOOLS if tool.name in grammar] == names


async def test_options_prompt_logprobs_are_returned(parts: fakes.Servers) -> None:
    parts.say("hello")
    async with server_of(parts) as address, AsyncClient(address) as client:
        answer = await client.generate([10, 11, 12], Options(prompt_logprobs=2))
        assert [(place.token_id, place.logprob, place.rank) for place in answer.prompt_logprobs] == [
            (11, -11.0, 3),
            (12, -12.0, 3),
        ]
        assert answer.prompt_logprobs[0].top == {0: 0.0, 1: -1.0}
        assert answer.text == "hello"
        pieces = [piece async for piece in client.stream([10, 11], Options(prompt_logprobs=0, max_tokens=0))]
        assert [len(piece.prompt_logprobs) for piece in pieces] == [1, 0]


async def test_options_best_of_vote_and_beams_arrive_at_end(parts: fakes.Servers) -> None:
    parts.say("it is 5", logprobs=True)
    async with server_of(parts) as address, AsyncClient(address) as client:
        answer = await client.generate("a", Options(n=3, vote=True, vote_pattern="[0-9]"))
        (choice,) = answer.choices
        assert choice.vote is not None
        assert (choice.text, choice.vote.answer, choice.vote.votes, choice.vote.of) == ("it is 5", "5", 3, 3)
        assert len((await client.generate("a", Options(n=2, best_of=3))).choices) == 2
        beams = Options(n=2, use_beam_search=True, length_penalty=2.0, early_stopping="never")
        await client.generate("a", beams)
        beam_search = parts.generator.requests[-1].beams
        assert beam_search is not None
        assert (beam_search.num_beams, beam_search.length_penalty, beam_search.early_stopping) == (2, 2.0, "never")


async def test_options_map_to_request_fields() -> None:
    options = Options(
        tools=TOOLS,
        chat_template_kwargs={"think": True, "level": 7, "share": 0.5, "name": "x", "nothing": None},
        continue_final_message=True,
        parallel_tool_calls=False,
        cached_content="cachedContents/x",
    )
    call = ToolCall(id="c", name="clock", arguments="{}")
    request = generate_request([Turn(role="assistant", tool_calls=[call], cached_for="1h")], options)
    kinds = {name: value.WhichOneof("kind") for name, value in request.chat_template_kwargs.items()}
    assert kinds == {"think": "flag", "level": "integer", "share": "number", "name": "text", "nothing": None}
    assert (request.continue_final_message, request.cached_content) == (True, "cachedContents/x")
    assert request.HasField("parallel_tool_calls")
    assert request.chat.messages[0].tool_calls[0].name == "clock"
    assert request.chat.messages[0].cache_control.ttl == "1h"
    assert request.stream_ids


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (Options(tools=[Tool(name="f", parameters="[")]), "tools"),
        (Options(tools=[Tool(name=3)]), "tools"),  # type: ignore[arg-type]
        (Options(tool_choice=ToolChoice(mode="required")), "tool_choice"),
        (Options(chat_template_kwargs={"x": [1]}), "chat_template_kwargs"),  # type: ignore[dict-item]
        (Options(chat_template_kwargs={"x": "y"}), "chat_template_kwargs"),
        (Options(early_stopping="soon"), "early_stopping"),  # type: ignore[arg-type]
        (Options(best_of=1, n=2), "best_of"),
        (Options(prompt_logprobs=99), "prompt_logprobs"),
        (Options(cached_content="cachedContents/x"), "cached_content"),
    ],
)
async def test_options_errors_name_the_field(parts: fakes.Servers, options: Options, param: str) -> None:
    async with server_of(parts) as address, AsyncClient(address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.chat(HELLO, options)
        assert caught.value.param == param


@pytest.mark.parametrize("more", [{"prompt_logprobs": 0}, {"best_of": 2}, {"vote": True}, {"use_beam_search": True}])
def test_options_stream_without_ids_is_not_resumed(more: dict[str, Any]) -> None:
    """It is retried before the first event; later a retry would repeat events."""
    request = generate_request("a", Options(**more))
    assert not request.stream_ids
    progress = StreamProgress(request, max_reconnects=2, rng=Random(1))
    broken = Unavailable("Socket closed")
    assert progress.after(broken, from_server=False) is not None
    progress.on_message(pb.GenerateResponse(text="a"))
    assert progress.after(broken, from_server=False) is None


async def test_options_reasoning_is_separate_from_answer() -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    parts = fakes.make_servers(fakes.make_tokenizer(template))
    count = len(parts.say("so\n</think>\n\nfour")) - len(parts.tokenizer.encode("\n\nfour")) - 1
    async with server_of(parts) as address, AsyncClient(address) as client:
        answer = await client.chat(HELLO)
        (choice,) = answer.choices
        assert (choice.text, choice.reasoning_content) == ("four", "so")
        assert answer.usage.reasoning_tokens == count
        await client.chat([*HELLO, choice.turn(), *HELLO])
        assert "[so]four" in parts.tokenizer.decode(parts.generator.requests[-1].prompt_token_ids)
        with pytest.raises(InvalidRequest, match="reasoning_content is allowed only in an assistant message"):
            await client.chat([Turn(role="user", content="a", reasoning_content="b")])


async def test_options_prediction_is_sent_and_its_use_returned(parts: fakes.Servers) -> None:
    parts.say("four", prediction=PredictionUse(3, 1))
    async with server_of(parts) as address, AsyncClient(address) as client:
        answer = await client.chat(HELLO, Options(prediction="the quick"))
        (request,) = parts.generator.requests
        assert request.prediction == array("i", parts.tokenizer.encode("the quick", add_special_tokens=False))
        assert (answer.usage.accepted_prediction_tokens, answer.usage.rejected_prediction_tokens) == (3, 1)
