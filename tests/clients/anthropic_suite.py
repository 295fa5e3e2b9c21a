"""Requests of the `anthropic` package to the HTTP API, run by an interpreter that has that package."""

import asyncio
import os
import uuid

import anthropic

URL, KEY = os.environ["TANDEM_URL"], os.environ["TANDEM_KEY"]
MODEL = "tandem-tiny"
TALK = [{"role": "user", "content": "The code of amber is 4821. What is the code of amber?"}]
GREEDY = {"temperature": 0.0}
TOOL = {
    "name": "look_up",
    "description": "Looks a code up.",
    "input_schema": {
        "type": "object",
        "properties": {"of": {"enum": ["amber", "bear"]}},
        "required": ["of"],
        "additionalProperties": False,
    },
}


def refused(kind: type[Exception], ask) -> None:
    """It is refused so."""
    try:
        ask()
    except kind:
        return
    raise AssertionError(f"not refused with {kind.__name__}")


def cached(client: anthropic.Anthropic) -> None:
    """What is marked is made once and read afterwards."""
    rules = " ".join(f"Rule {number} of {uuid.uuid4().hex}." for number in range(20))
    marked = [{"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
    ask = {"model": MODEL, "system": marked, "messages": TALK, "max_tokens": 4, "extra_body": GREEDY}
    made, read = client.messages.create(**ask).usage, client.messages.create(**ask).usage
    assert made.cache_creation_input_tokens > 100
    # The question is the same as well: what of it stands in a whole block is read, too.
    assert read.cache_read_input_tokens >= made.cache_creation_input_tokens, (made, read)
    assert read.cache_creation_input_tokens == 0
    whole = made.input_tokens + made.cache_creation_input_tokens
    assert read.input_tokens + read.cache_read_input_tokens == whole


def called(client: anthropic.Anthropic) -> None:
    """A tool that must be called is, whole and streamed, and its result goes back."""
    ask = {
        "model": MODEL,
        "messages": TALK,
        "max_tokens": 100,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
        "extra_body": GREEDY,
    }
    message = client.messages.create(**ask)
    assert message.stop_reason == "tool_use", message.stop_reason
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.input["of"] in ("amber", "bear")
    with client.messages.stream(**ask) as stream:
        (same,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (same.name, same.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4821"}
    turns = [*TALK, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    after = client.messages.create(
        model=MODEL, messages=turns, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=4
    )
    assert after.usage.output_tokens > 0


def main() -> None:
    """Run every check of this client, one after the other."""
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=120)
    whole = client.messages.create(model=MODEL, messages=TALK, max_tokens=16, extra_body=GREEDY)
    text = whole.content[0].text
    assert text.strip() == "4821", text
    with client.messages.stream(model=MODEL, messages=TALK, max_tokens=16, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=TALK)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stopped = client.messages.create(model=MODEL, messages=TALK, max_tokens=16, stop_sequences=["2"], extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "2")
    cached(client)
    called(client)
    ask = client.messages.create
    refused(anthropic.NotFoundError, lambda: ask(model="claude", messages=TALK, max_tokens=4))
    refused(anthropic.BadRequestError, lambda: ask(model=MODEL, messages=TALK, max_tokens=0))
    unauthenticated = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    refused(
        anthropic.AuthenticationError, lambda: unauthenticated.messages.create(model=MODEL, messages=TALK, max_tokens=4)
    )
    assert asyncio.run(at_once()) == [text] * 16
    print(f"anthropic {anthropic.__version__}: messages, streams, count_tokens, cache_control, tools, errors, async")


async def at_once() -> list[str]:
    """Sixteen at the same time."""
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, timeout=120) as client:
        requests = (
            client.messages.create(model=MODEL, messages=TALK, max_tokens=16, extra_body=GREEDY) for _ in range(16)
        )
        return [answer.content[0].text for answer in await asyncio.gather(*requests)]


main()
