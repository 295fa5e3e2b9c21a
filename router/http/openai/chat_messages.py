"""The messages of a chat in OpenAI's format, including calls in the older form, which has no ids."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec.structs import replace

from router.http.body.strict_body import OnlyTypes, StrictBody, at_most
from router.http.openai.tool_schemas import CalledFunction, ToolCallPart
from router.text.conversation import Message
from router.text.tools import MAX_CALLS, AssistantToolCall
from tandem.errors import InvalidRequest

MAX_PARTS = 256  # of one message's content


class TextPart(StrictBody):
    """One part of a message's content; images and sound are not supported yet."""

    TYPES: ClassVar[OnlyTypes | None] = OnlyTypes("messages", "content", frozenset({"text"}))
    type: str
    text: str = ""


class ChatTurn(StrictBody):
    role: str
    tool_calls: Annotated[list[ToolCallPart] | None, at_most(MAX_CALLS)] = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """A call in the older form."""
    content: Annotated[str | list[TextPart] | None, at_most(MAX_PARTS)] = None
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning, as it was in the answer."""

    def message(self) -> Message:
        """Convert to the turn that the template sees, joining text parts by line breaks."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        if content is None and self.role != "assistant":
            raise InvalidRequest("messages: content is missing", param="messages")
        calls = tuple([part.call() for part in self.tool_calls]) if self.tool_calls else ()
        return Message(
            role=self.role,
            content=content or "",
            name=self.name,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning_content,
        )


def conversation(turns: Sequence[ChatTurn]) -> list[Message]:
    """Convert all turns for the template. Raises InvalidRequest.

    A call in the older form gets an id by its position, nine letters and digits, which templates of all families
    accept; a message of role `function` is the result of the last call of its name.
    """
    messages: list[Message] = []
    ids: dict[str | None, str] = {}
    for number, turn in enumerate(turns):
        message = turn.message()
        if (called := turn.function_call) is not None:
            if message.tool_calls:
                raise InvalidRequest("messages: send either tool_calls or function_call", param="messages")
            ids[called.name] = f"call{number:05d}"
            call = AssistantToolCall(id=ids[called.name], name=called.name, arguments=called.arguments)
            message = replace(message, tool_calls=(call,))
        if turn.role == "function":
            if turn.name not in ids:
                raise InvalidRequest("messages: role function needs the name of a called function", param="messages")
            message = replace(message, role="tool", name=None, tool_call_id=ids[turn.name])
        messages.append(message)
    return messages
