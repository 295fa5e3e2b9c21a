"""Requests of the `openai` package to the HTTP API, run by an interpreter that has that package."""

import asyncio
import os
from typing import Literal

import openai
from pydantic import BaseModel

URL, KEY = f"{os.environ['TANDEM_URL']}/v1", os.environ["TANDEM_KEY"]
MODEL = "tandem-tiny"
TALK = [{"role": "user", "content": "The code of amber is 4821. What is the code of amber?"}]


class Code(BaseModel):
    """What an answer is parsed into: a small model that may write any number never ends it."""

    code: Literal["4821", "7305"]


def refused(kind: type[Exception], ask) -> None:
    """It is refused so."""
    try:
        ask()
    except kind:
        return
    raise AssertionError(f"not refused with {kind.__name__}")


def main() -> None:
    """Run every check of this client, one after the other."""
    client = openai.OpenAI(base_url=URL, api_key=KEY, timeout=120)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    whole = client.chat.completions.create(model=MODEL, messages=TALK, temperature=0, max_tokens=16)
    text = whole.choices[0].message.content
    assert text.strip() == "4821", text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=TALK, temperature=0, max_tokens=16, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(model=MODEL, messages=TALK, temperature=0, max_tokens=16) as events:
        assert events.get_final_completion().choices[0].message.content == text
    parsed = client.chat.completions.parse(model=MODEL, messages=TALK, temperature=0, response_format=Code)
    assert isinstance(parsed.choices[0].message.parsed, Code)
    plain = client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=8, logprobs=2, n=2, seed=1)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=TALK, max_tokens=1)
    assert raw.headers["x-request-id"]
    answer = client.responses.create(model=MODEL, input="Tell me of a fox.", max_output_tokens=16, temperature=0)
    assert answer.output_text
    numbers = client.embeddings.create(model=MODEL, input=["a fox", "an owl"])
    assert len(numbers.data) == 2
    ask = client.chat.completions.create
    refused(openai.NotFoundError, lambda: ask(model="gpt-4", messages=TALK))
    refused(openai.BadRequestError, lambda: ask(model=MODEL, messages=TALK, temperature=-1))
    unauthenticated = openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, unauthenticated.models.list)
    assert asyncio.run(at_once()) == [text] * 16
    print(
        f"openai {openai.__version__}: models, chat, streams, parse, completions, responses, embeddings, errors, async"
    )


async def at_once() -> list[str]:
    """Sixteen at the same time."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, timeout=120) as client:
        requests = (
            client.chat.completions.create(model=MODEL, messages=TALK, temperature=0, max_tokens=16) for _ in range(16)
        )
        return [answer.choices[0].message.content for answer in await asyncio.gather(*requests)]


main()
