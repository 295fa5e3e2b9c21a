"""Cache marks in conversations: their position in the prompt, also in long ones of many blocks."""

import pytest

from router.api.cache_breakpoints import CacheBreakpoint, common_length, prepare_with_breakpoints
from router.api.request.client_request import ClientRequest
from router.http.anthropic.body import MessagesBody
from router.http.body.json_body import validate
from router.text.conversation import Message, TemplateOptions
from router.text.tools import AssistantToolCall
from tests.support.router.servers import fakes

KEPT = {"type": "ephemeral"}


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("more", [0, 1, 3000])
def test_common_length_counts_equal_leading_tokens(length: int, more: int) -> None:
    one = list(range(length))
    assert common_length(one, (*one, *range(more))) == length
    assert common_length((*one, *range(more)), one) == length
    assert common_length([*one, -1, *one], (*one, -2, *one)) == length


def test_breakpoint_inside_a_turn_covers_text_before_it() -> None:
    texts = [f"text {number}" for number in range(600)]
    blocks = [{"type": "text", "text": text} for text in texts]
    blocks[500]["cache_control"] = KEPT
    turns = [{"role": "user", "content": blocks[at : at + 100]} for at in range(0, 600, 100)]
    conversation = validate(MessagesBody, {"model": "m", "max_tokens": 1, "messages": turns}).conversation()
    (message,) = conversation.messages
    assert message.content == "\n".join(texts)
    assert conversation.marks == [CacheBreakpoint(1, len("\n".join(texts[:501])), 300.0)]


def test_breakpoints_follow_tool_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "42", "cache_control": KEPT}
    text = {"type": "text", "text": "one"}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [text, {**call, "cache_control": KEPT}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "before"}, result, {**text, "cache_control": KEPT}]},
    ]
    conversation = validate(MessagesBody, {"model": "m", "max_tokens": 1, "messages": turns}).conversation()
    shown = [(message.role, message.content) for message in conversation.messages]
    assert shown == [("user", "hi"), ("assistant", "one\ntwo"), ("user", "before"), ("tool", "42"), ("user", "one")]
    assert conversation.messages[1].tool_calls == (AssistantToolCall(id="a", name="f", arguments="{}"),)
    assert conversation.marks == [
        CacheBreakpoint(2, 3, 300.0),
        CacheBreakpoint(4, 2, 300.0),
        CacheBreakpoint(5, 3, 300.0),
    ]


async def test_breakpoint_after_varying_template_head_covers_nothing_of_it() -> None:
    """Thinking options are rendered before the mark, and also when the mark's position is computed."""
    template = "[{{ reasoning_effort }}]{% for m in messages %}{{ m.content }}{% endfor %}</think>"
    parts = fakes.make_servers(fakes.make_tokenizer(template))
    conversation = [Message(role="user", content="the quick brown fox " * 20), Message(role="user", content="jumps")]
    for options in (TemplateOptions(), TemplateOptions(thinks=False), TemplateOptions(effort="low")):
        fields = ClientRequest(template=options)
        (pin,) = (
            await prepare_with_breakpoints(parts.frontend, conversation, [CacheBreakpoint(1, 380, 300.0)], fields)
        ).request.pins
        assert pin.num_tokens >= 64
