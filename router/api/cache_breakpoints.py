"""Cache breakpoints: how many prompt tokens each marked beginning of a conversation covers."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from router.api.frontend import Frontend
from router.api.prompts import PromptReader
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.text.chat_template import Message
from router.text.conversation import TemplateOptions
from router.text.tools import ToolUse
from router.types.requests import PinRequest
from tandem.errors import InvalidRequest
from tandem.values.block_hash import HASH_BLOCK_TOKENS

MAX_BREAKPOINTS = 4
BREAKPOINT_TTL_S = {"5m": 300.0, "1h": 3600.0}
"""Times, in seconds from the last use, for which a client may request to keep a prefix."""
DEFAULT_BREAKPOINT_TTL = "5m"
_CONTROL = "cache_control"
_PIECE = 1024


class CacheBreakpoint(NamedTuple):
    """A mark up to which the conversation should stay cached."""

    num_messages: int
    """Messages covered, including the one that holds the mark; 0: the mark is before any message."""
    num_chars: int
    """Characters of that message's content that are covered."""
    ttl_s: float


def check_breakpoints(marks: Sequence[CacheBreakpoint]) -> None:
    """Check the number of marks. Raises InvalidRequest for too many."""
    if len(marks) > MAX_BREAKPOINTS:
        raise InvalidRequest(f"{_CONTROL}: at most {MAX_BREAKPOINTS} blocks may set it", param=_CONTROL)


async def prepare_with_breakpoints(
    frontend: Frontend, messages: Sequence[Message], marks: Sequence[CacheBreakpoint], fields: ClientRequest
) -> PreparedRequest:
    """Prepare as `Frontend.prepare_chat` does, with a pin request for each mark that covers a block."""
    prepared = await frontend.prepare_chat(messages, fields)
    if not marks:
        return prepared
    request = prepared.request
    ids, tools = request.prompt_token_ids, fields.tools
    options = replace(fields.template, continue_final=False)
    with frontend.preparing(fields.tenant) as texts:
        lengths = [await breakpoint_tokens(texts, messages, mark, ids, tools, options) for mark in marks]
    pins = tuple(
        PinRequest(num_tokens=length // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS, ttl_s=mark.ttl_s)
        for mark, length in zip(marks, lengths, strict=True)
        if length >= HASH_BLOCK_TOKENS
    )
    return replace(prepared, request=replace(request, pins=pins))


async def breakpoint_tokens(
    prompts: PromptReader,
    messages: Sequence[Message],
    mark: CacheBreakpoint,
    ids: Sequence[int],
    tools: ToolUse | None = None,
    options: TemplateOptions = TemplateOptions(),  # noqa: B008  # frozen
) -> int:
    """Count the tokens of the prompt `ids` that do not depend on what follows the mark. Raises InvalidRequest."""
    head = list(messages[: mark.num_messages])
    if head:
        head[-1] = replace(head[-1], content=head[-1].content[: mark.num_chars])
    if not head or head[-1].role == "system":
        head.append(Message(role="user", content=""))  # templates require a user turn
    try:
        cut = await prompts.encode_chat(head, add_generation_prompt=False, tools=tools, options=options)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{_CONTROL}: this model's chat template cannot end there: {error.message}", param=_CONTROL
        ) from None
    return common_length(cut, ids)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading elements that are equal."""
    if len(one) > _PIECE:
        # Compare long prompts in slices, which is far faster than element by element.
        for start in range(0, len(one), _PIECE):
            pieces = [tuple(ids[start : start + _PIECE]) for ids in (one, other)]
            if pieces[0] != pieces[1]:
                return start + common_length(*pieces)
        return len(one)
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
