"""Writes one streamed answer as events.

Most events differ from the previous one only in their text: `_TextEvent` keeps the bytes around it, cut out of a chunk
that the answer itself made. Events with anything else are built as a whole.
"""

from typing import Any

import orjson
from msgspec import Struct

from router.api.answer.choice_text import TextDelta, TextSink
from router.api.answer.stream_cursor import StreamCursor
from router.api.answer.timing_report import timing_object
from router.api.answer.usage import CallUsage
from router.http.body.sse import EventStream, event
from router.http.openai.answers import AnswerFormat
from router.http.openai.usage import usage_object
from router.types.requests import PlainEvents
from tandem.values.random_pool import RANDOM


class StreamExtras(Struct, frozen=True, kw_only=True):
    """Requested contents of a stream besides the text."""

    include_usage: bool
    """Whether usage comes in an event of its own at the end; it is null in those before."""
    continuous_usage: bool
    timing: bool


class SseAnswerStream(TextSink):
    """A `TextSink` that writes events, with the usage after the last choice's end."""

    def __init__(
        self, events: EventStream, answer: AnswerFormat, cursor: StreamCursor, usage: CallUsage, extras: StreamExtras
    ) -> None:
        self._events = events
        self._answer = answer
        self._cursor = cursor
        self._usage = usage
        self._extras = extras
        self._fields: dict[str, Any] = {"usage": None} if extras.include_usage else {}
        self._opened = cursor.is_continued
        self._text_events: dict[int, _TextEvent] = {}
        # Nothing is sent for a choice whose end the client has.
        self._text_only = answer.is_text_only and not extras.continuous_usage and not cursor.is_continued
        self._has_ids = cursor.has_ids

    async def ready(self) -> None:
        await self._events.ready()

    def on_text(self, choice_index: int, token_id: int, text: str) -> bool:
        if not (self._text_only and self._opened):
            return super().on_text(choice_index, token_id, text)
        self._usage.add_token(choice_index, token_id)
        event_id = self._cursor.text_id(choice_index, text) if self._has_ids else None
        return bool(text) and self._write_text(choice_index, text, event_id)

    def plain_events(self, choice_index: int) -> PlainEvents | None:
        # Several choices share a connection. A stream with ids may be continued elsewhere without notice from here.
        if not (self._text_only and self._opened and self._usage.is_single) or self._has_ids:
            return None
        link = self._events.direct
        if link is None or self._usage.thinks(choice_index) or (descriptor := link.descriptor()) is None:
            return None
        around = self._text_events.get(choice_index) or self._cut(choice_index)
        return PlainEvents(descriptor, link.write_rest, around.before + b'"', b'"' + around.after)

    def on_written(self, count: int) -> None:
        self._usage.completion_tokens += count

    def on_delta(self, delta: TextDelta) -> bool:
        self._usage.add(delta)
        if self._text_only and self._opened and delta.finish is None:
            self._cursor.moved(delta)
            return bool(delta.text) and self._write_text(delta.choice_index, delta.text, self._cursor.id_of())
        chunks = [] if self._cursor.has_ended(delta.choice_index) else self._answer.chunks(delta)
        if self._extras.continuous_usage:
            self._fields["usage"] = usage_object(self._usage)
        if self._extras.timing and self._usage.complete and not self._extras.include_usage and chunks:
            chunks[-1]["timing"] = timing_object(self._usage)
        events: list[bytes] = []
        if not self._opened:
            self._cursor.begun(delta)
            events = self._opening()
        self._opened = True
        self._cursor.moved(delta)
        events += [event(chunk | self._fields, event_id=self._id_of(chunk)) for chunk in chunks]
        if self._extras.include_usage and self._usage.complete:
            events.append(self._usage_event())
        return bool(events) and self._events.write(b"".join(events))

    def _write_text(self, choice_index: int, text: str, event_id: bytes | None) -> bool:
        around = self._text_events.get(choice_index) or self._cut(choice_index)
        whole = around.before + orjson.dumps(text) + around.after
        return self._events.write(whole if event_id is None else b"id: " + event_id + b"\n" + whole)

    def _usage_event(self) -> bytes:
        timing = {"timing": timing_object(self._usage)} if self._extras.timing else {}
        ending = self._answer.ending()
        content = ending | {"usage": usage_object(self._usage)} | timing
        return event(content, event_id=self._id_of(ending))

    def _id_of(self, chunk: dict[str, Any]) -> bytes | None:
        choices = chunk["choices"]
        ended = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
        return self._cursor.id_of(ended=ended, usage_sent=not choices)

    def _opening(self) -> list[bytes]:
        """Only the last event has an id: a client that lacks any of them starts again."""
        chunks = self._answer.opening()
        return [event(c | self._fields, event_id=self._id_of(c) if c is chunks[-1] else None) for c in chunks]

    def _cut(self, index: int) -> "_TextEvent":
        around = self._text_events[index] = _TextEvent.cut(self._answer, index, self._fields)
        return around


class _TextEvent(Struct, frozen=True, kw_only=True):
    """The bytes before and after the text of one choice's events."""

    before: bytes
    after: bytes

    @classmethod
    def cut(cls, answer: AnswerFormat, index: int, fields: dict[str, Any]) -> "_TextEvent":
        # Nothing that a client chose, such as the answer's id, can contain it.
        mark = RANDOM.token_hex(16)
        (chunk,) = answer.chunks(TextDelta(choice_index=index, text=mark))
        before, after = event(chunk | fields).split(orjson.dumps(mark))
        return cls(before=before, after=after)
