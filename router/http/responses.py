"""POST /v1/responses, OpenAI's newer form of a conversation: items in, items out, typed events when streamed.

Nothing is stored: `store: true` and `previous_response_id` are refused, and a stream is not continued after it broke.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.asked import Prepared
from router.call_reader import reader_of
from router.http.answering import Answering
from router.http.errors import error_object
from router.http.generation import IDS_HEADER, TIMING_HEADER, trace_and_time
from router.http.link import WhileConnected
from router.http.response_items import ResponseItems, Told
from router.http.response_schemas import ResponsesBody
from router.http.schemas import validate
from router.http.sse import EventStream, SseResponse
from router.http.whole_answer import WholeResponse
from router.stream_ids import LAST_EVENT_ID
from router.text_stream import TextDelta, WholeText
from router.timing_report import SERVER_TIMING, server_timing, timing_object
from router.usage import Usage
from tandem.errors import InvalidRequest, ServingError
from tandem.outputs import FinishReason

_FIELD_OF = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning"}
"""Where a fault that the frontend names stands here."""


class ResponsesRoutes:
    """The handler of the route."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._frontend = answering.frontend

    async def create(self, request: Request) -> Response:
        """One response, whole or as events."""
        data = await self._answering.read_object(request)
        for header in (LAST_EVENT_ID, IDS_HEADER):
            if header in request.headers:
                raise InvalidRequest(f"{header}: streams of this route cannot be continued", param=header)
        body = validate(ResponsesBody, data)
        prepare = partial(self._prepare, body, request)
        has_timing = request.headers.get(TIMING_HEADER) == "1"

        def show(prepared: Prepared) -> _Answer:
            usage = Usage([prepared], self._frontend.clock, self._answering.metrics.usage.prices)
            return _Answer(data, prepared, usage, model=self._frontend.model.name, has_timing=has_timing)

        if body.stream:
            stream = _ResponseStream(self._answering, prepare, show)
            return SseResponse(stream.run, show_error=stream.failed, closing=b"")
        async with WhileConnected(request.scope, request.receive):
            prepared, text = await prepare(), WholeText()
            await self._answering.read_text([prepared], text)
            answer = show(prepared)
            for delta in text.choices():
                answer.take(delta)
        return WholeResponse(orjson.dumps(answer.ended()), headers=answer.headers())

    async def _prepare(self, body: ResponsesBody, request: Request) -> Prepared:
        try:
            fields = trace_and_time(body.fields(request.state.tenant), request)
            return await self._frontend.prepare_chat(body.messages(), fields)
        except InvalidRequest as error:
            field = _FIELD_OF.get(error.param or "")
            if field is None:
                raise
            raise type(error)(f"{field}: {error.message.removeprefix(f'{error.param}: ')}", param=field) from None


class _Answer:
    """One response: the object as it stands, and what tells of its growth."""

    def __init__(
        self, asked: dict[str, Any], prepared: Prepared, usage: Usage, *, model: str, has_timing: bool
    ) -> None:
        """`asked`: the body as it came."""
        request = prepared.request
        self._asked, self._prepared, self._model = asked, prepared, model
        self._created_s = int(time.time())
        self._reader = reader_of(prepared, 0)
        self._items = ResponseItems(request.request_id)
        self._usage = usage
        self._has_timing = has_timing
        self._is_cut = False

    def take(self, delta: TextDelta) -> list[Told]:
        """What the next of the answer adds."""
        self._usage.add(delta)
        told = list(self._items.take(self._reader.read(delta)))
        if delta.finish is not None:
            self._is_cut = delta.finish.reason is FinishReason.LENGTH
            told += self._items.end(is_cut=self._is_cut or self._reader.has_open_call)
        return told

    def begun(self) -> dict[str, Any]:
        """Before the first item."""
        return self._object("in_progress")

    def ended(self) -> dict[str, Any]:
        """After the last."""
        whole = self._object("incomplete" if self._is_cut else "completed")
        whole |= {"output": self._items.items, "usage": _usage_object(self._usage)}
        whole |= {"incomplete_details": {"reason": "max_output_tokens"}} if self._is_cut else {}
        whole |= {} if self._is_cut else {"completed_at": int(time.time())}
        return whole | ({"timing": timing_object(self._usage)} if self._has_timing else {})

    def headers(self) -> dict[str, str]:
        """Of a whole response."""
        return {SERVER_TIMING: server_timing(self._usage)} if self._has_timing else {}

    def failed(self, error: ServingError) -> dict[str, Any]:
        """When it could not go on."""
        shown = error_object(error)["error"]
        told = {"code": "server_error", "message": shown["message"]}
        return self._object("failed") | {"output": self._items.items, "error": told}

    def _object(self, status: str) -> dict[str, Any]:
        asked, sampling, tools = self._asked, self._prepared.request.sampling, self._asked.get("tools") or []
        return {
            "id": f"resp_{self._prepared.request.request_id}",
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": [{"strict": False, "parameters": None, "description": None} | tool for tool in tools],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.get("user"),
        }


class _ResponseStream:
    """A `TextReader` that writes numbered events."""

    def __init__(
        self,
        answering: Answering,
        prepare: Callable[[], Awaitable[Prepared]],
        show: Callable[[Prepared], _Answer],
    ) -> None:
        self._answering = answering
        self._prepare = prepare
        self._show = show
        self._answer: _Answer | None = None
        self._number = 0

    async def run(self, events: EventStream) -> None:
        """Nothing is written before the first token, so that earlier errors keep their HTTP status."""
        prepared = await self._prepare()
        self._answer = answer = self._show(prepared)
        self._events = events
        await self._answering.read_text([prepared], self)
        whole = answer.ended()
        events.write(self._written([{"type": f"response.{whole['status']}", "response": whole}]))

    def failed(self, error: ServingError) -> bytes:
        """The last event of a stream that broke."""
        if self._answer is None:
            return b""
        return self._written([{"type": "response.failed", "response": self._answer.failed(error)}])

    def take(self, delta: TextDelta) -> bool:
        """See TextReader."""
        if self._answer is None:
            return False
        told: list[Told] = []
        if not self._number:
            begun = self._answer.begun()
            told = [{"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")]
        told += self._answer.take(delta)
        return bool(told) and self._events.write(self._written(told))

    async def ready(self) -> None:
        """See TextReader."""
        await self._events.ready()

    def _written(self, told: Iterable[Told]) -> bytes:
        lines = []
        for one in told:
            content = orjson.dumps(one | {"sequence_number": self._number})
            lines.append(b"event: " + one["type"].encode() + b"\ndata: " + content + b"\n\n")
            self._number += 1
        return b"".join(lines)


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
