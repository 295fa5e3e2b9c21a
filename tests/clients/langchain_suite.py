"""Run by an interpreter that has `langchain-openai`."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, KEY = f"{os.environ['TANDEM_URL']}/v1", os.environ["TANDEM_KEY"]
QUESTION = "The code of amber is 4821. What is the code of amber?"


class Code(BaseModel, extra="forbid"):
    """One of two codes, and nothing else: a small model that may write more never comes to an end."""

    code: Literal["4821", "7305"]


def main() -> None:
    """Run every check of this client, one after the other."""
    model = ChatOpenAI(model="tandem-tiny", base_url=URL, api_key=KEY, temperature=0, max_tokens=64, timeout=120)
    text = model.invoke(QUESTION).content
    assert text.strip() == "4821", text
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == text
    assert [one.content for one in model.batch([QUESTION] * 4)] == [text] * 4
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Code, method=method, include_raw=True).invoke(QUESTION)
        assert isinstance(answer["parsed"], Code), (method, answer)
    assert asyncio.run(later(model)) == [text, text]
    print(f"langchain-openai {version('langchain-openai')}: invoke, stream, batch, structured output, async")


async def later(model: ChatOpenAI) -> list[str]:
    """The same without waiting."""
    streamed = [chunk.content async for chunk in model.astream(QUESTION)]
    return [(await model.ainvoke(QUESTION)).content, "".join(streamed)]


main()
