"""`chat_template_kwargs` and `continue_final_message`: rendered prompts and refusals."""

from typing import Any

import pytest

from router.text.chat_template import ChatTemplate
from router.text.conversation import MAX_VARIABLE_CHARS, MAX_VARIABLES
from router.text.tokenizer import Tokenizer
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of, error_of

TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% set own = 1 %}"
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ bos_token }}{% endif %}"
)
EFFORT = TEMPLATE.replace("mood", "reasoning_effort")
THINKS = "{% if enable_thinking is defined and enable_thinking is false %}[no]{% endif %}" + TEMPLATE
TRIMS = TEMPLATE.replace("m.content", "m.content | trim")
DROPS = TEMPLATE.replace("m.content", "m.role")


def parts_of(source: str) -> fakes.Servers:
    template = ChatTemplate(source, {"bos_token": "<|bos|>"})
    parts = fakes.make_servers(Tokenizer(fakes.byte_level_spec(), template))
    parts.say("hello")
    return parts


async def prompt(source: str, body: dict[str, Any]) -> str:
    parts = parts_of(source)
    async with client_of(parts) as client:
        answer = await client.post(CHAT, json=HELLO | body)
    assert answer.status_code == 200, answer.text
    return parts.tokenizer.decode(parts.generator.requests[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("effort", ["none", "low", "xhigh"])
async def test_template_effort_is_passed_or_refused(effort: str) -> None:
    assert (await prompt(EFFORT, {"reasoning_effort": effort})).startswith(f"[{effort}]")
    parts = parts_of(EFFORT)
    async with client_of(parts) as client:
        answer = await client.post("/v1/responses", json={"input": "a", "reasoning": {"effort": effort}})
    assert answer.json()["reasoning"]["effort"] == effort
    assert parts.tokenizer.decode(parts.generator.requests[0].prompt_token_ids).startswith(f"[{effort}]")


async def test_template_without_effort_accepts_none() -> None:
    assert (await prompt(THINKS, {"reasoning_effort": "none"})).startswith("[no]")
    assert not (await prompt(THINKS, {"reasoning_effort": None})).startswith("[no]")


async def test_template_variables_are_rendered_as_text() -> None:
    assert (await prompt(TEMPLATE, {"chat_template_kwargs": {"mood": 3}})).startswith("[3]<|user|>")
    text = await prompt(TEMPLATE, {"chat_template_kwargs": {"mood": "<|end|>"}})
    assert text.startswith("[<|end|>]")
    parts = parts_of(TEMPLATE)
    async with client_of(parts) as client:
        await client.post(CHAT, json=HELLO | {"chat_template_kwargs": {"mood": "<|end|>"}})
    assert parts.generator.requests[0].prompt_token_ids.count(fakes.END) == 1


@pytest.mark.parametrize("source", [TEMPLATE, TRIMS])
async def test_template_continue_final_message_cuts_after_it(source: str) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "the quick "}]
    text = await prompt(source, {"messages": messages, "continue_final_message": True, "add_generation_prompt": False})
    assert text.endswith("<|user|>the quick ")
    assert await prompt(source, {"messages": messages, "continue_final_message": True}) == text


ASSISTANT = {"role": "assistant", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("source", "change", "param"),
    [
        (TEMPLATE, {"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"own": 1}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"mood": ["x"]}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {"mood": "x" * (MAX_VARIABLE_CHARS + 1)}}, "chat_template_kwargs"),
        (TEMPLATE, {"chat_template_kwargs": {f"x{i}": 1 for i in range(MAX_VARIABLES + 1)}}, "chat_template_kwargs"),
        (TEMPLATE, {"reasoning_effort": "none"}, "reasoning_effort"),
        (THINKS, {"reasoning_effort": "low"}, "reasoning_effort"),
        (EFFORT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (EFFORT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort"),
        (TEMPLATE, {"continue_final_message": True}, "continue_final_message"),
        (TEMPLATE, {"messages": [ASSISTANT | {"tool_calls": [CALL]}], "continue_final_message": True},
         "continue_final_message"),
        (TEMPLATE, {"messages": [ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        (DROPS, {"messages": [ASSISTANT], "continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
async def test_template_invalid_options_are_refused(source: str, change: dict[str, Any], param: str) -> None:
    parts = parts_of(source)
    async with client_of(parts) as client:
        answer = await client.post(CHAT, json=HELLO | change)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert not parts.generator.requests
