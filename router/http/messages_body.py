"""What clients may send to Anthropic's routes: types here, bounds in the frontend."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from router.asked import ClientFields
from router.chat_template import Message
from router.http.strict_body import StrictBody, at_most
from router.marked_prefixes import Mark
from router.prompts import MAX_MESSAGES
from router.stop_strings import MAX_STOP_STRINGS
from tandem.errors import InvalidRequest
from tandem.sampling import SamplingParams

MAX_MARKS = 4
_MAX_BLOCKS = 256  # of one message's content
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_SAMPLING = ("temperature", "top_k", "top_p")


class CacheControl(StrictBody):
    """The conversation up to this block is to stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        """From its last use on."""
        return _TTL_S[self.ttl or "5m"]


class TextBlock(StrictBody):
    """A part of a message. Images, documents, tools and thoughts are not supported yet."""

    type: str
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "text":
            raise InvalidRequest(f"content of type {kind[:40]!r} is not supported yet", param="messages")
        return data


def _as_blocks(content: Any) -> Any:
    """A text is a list of one block: what is wrong with a block is then said of the block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Content = Annotated[list[TextBlock], at_most(_MAX_BLOCKS), BeforeValidator(_as_blocks)]


class Turn(StrictBody):
    """One message."""

    role: Literal["user", "assistant"]
    content: _Content


class Metadata(StrictBody):
    """A note of the client's."""

    user_id: str | None = None


class Thinking(StrictBody):
    """No model here is told to think."""

    type: Literal["disabled"]


class Conversation(NamedTuple):
    """As the template sees it."""

    messages: list[Message]
    marks: list[Mark]


class CountBody(StrictBody):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: _Content | None = None
    cache_control: CacheControl | None = None
    """As if it stood on the last block."""
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role != "user":
            raise InvalidRequest("messages: the last one must be the user's", param="messages")
        return self

    def conversation(self) -> Conversation:
        """Turns of one role in a row are one turn; text blocks stand on lines of their own. Raises InvalidRequest."""
        turns: list[tuple[str, list[TextBlock]]] = []
        if self.system is not None:
            turns.append(("system", list(self.system)))
        for turn in self.messages:
            if turns and turns[-1][0] == turn.role:
                turns[-1][1].extend(turn.content)
            else:
                turns.append((turn.role, list(turn.content)))
        messages = [Message(role=role, content="\n".join(block.text for block in blocks)) for role, blocks in turns]
        marks = [mark for number, (_, blocks) in enumerate(turns) for mark in _marks(number + 1, blocks)]
        if self.cache_control is not None:
            size = len(messages[-1].content)
            marks.append(Mark(num_messages=len(messages), num_chars=size, ttl_s=self.cache_control.ttl_s))
        if len(marks) > MAX_MARKS:
            raise InvalidRequest(f"cache_control: at most {MAX_MARKS} blocks may have it", param="cache_control")
        return Conversation(messages, marks)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, at_most(MAX_STOP_STRINGS)] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def fields(self, tenant: str) -> ClientFields:
        """What the frontend validates."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return ClientFields(
            sampling=SamplingParams(**given),
            max_tokens=self.max_tokens,
            model=self.model,
            reads_along=bool(self.stream),
            stop=tuple(self.stop_sequences or ()),
            tenant=tenant,
        )


def _marks(num_messages: int, blocks: Sequence[TextBlock]) -> list[Mark]:
    marks, size = [], -1
    for block in blocks:
        size += 1 + len(block.text)
        if block.cache_control is not None:
            marks.append(Mark(num_messages=num_messages, num_chars=size, ttl_s=block.cache_control.ttl_s))
    return marks
