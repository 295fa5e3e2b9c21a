"""POST /v1/responses, OpenAI's newer form of a conversation: items in, items out, typed events when streamed.

Nothing is stored: `store: true` and `previous_response_id` are refused, and a stream is not continued after it broke.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.api.answer.call_reader import reader_of
from router.api.answer.choice_text import TextDelta, WholeText
from router.api.answer.timing_report import SERVER_TIMING, server_timing, timing_object
from router.api.answer.usage import Usage
from router.api.request.client_request import Prepared
from router.http.body.client_link import WhileConnected
from router.http.body.errors import error_object
from router.http.body.sse import EventStream, SseResponse
from router.http.openai.generation import IDS_HEADER, TIMING_HEADER, trace_and_time
from router.http.openai.prompt_logprobs import SLICE_VALUES
from router.http.openai.responses.items import ResponseItems, Told
from router.http.openai.responses.logprobs import ResponseLogprobs
from router.http.openai.responses.schemas import ResponsesBody
from router.http.openai.schemas import validate
from router.http.openai.whole_answer import WholeResponse
from router.http.routing.generation_calls import Answering
from router.types.stream_ids import LAST_EVENT_ID
from tandem.errors import InvalidRequest, ServingError
from tandem.values.outputs import FinishReason

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
            logprobs = ResponseLogprobs(prepared, self._frontend.tokenizer)
            return _Answer(data, prepared, usage, logprobs, model=self._frontend.model.name, has_timing=has_timing)

        if body.stream:
            stream = _ResponseStream(self._answering, prepare, show)
            return SseResponse(stream.run, show_error=stream.failed, closing=b"")
        async with WhileConnected(request.scope, request.receive):
            prepared, text = await prepare(), WholeText()
            await self._answering.read_text([prepared], text)
            answer = show(prepared)
            for delta in text.choices():
                answer.take(delta, await answer.all_logprobs(delta))
        return WholeResponse(orjson.dumps(answer.ended()), headers=answer.headers())

    async def _prepare(self, body: ResponsesBody, request: Request) -> Prepared:
        try:
            try:
                return await self._prepared(body, request, strict=True)
            except InvalidRequest as error:
                if error.param != "tools" or not body.leaves_strict_open:
                    raise
                # Strict is this API's default where it can be kept; who does not ask for it is not refused for it.
                return await self._prepared(body, request, strict=False)
        except InvalidRequest as error:
            field = _FIELD_OF.get(error.param or "")
            if field is None:
                raise
            raise type(error)(f"{field}: {error.message.removeprefix(f'{error.param}: ')}", param=field) from None

    async def _prepared(self, body: ResponsesBody, request: Request, *, strict: bool) -> Prepared:
        fields = trace_and_time(body.fields(request.state.tenant, strict=strict), request)
        return await self._frontend.prepare_chat(body.messages(), fields)


class _Answer:
    """One response: the object as it stands, and what tells of its growth."""

    def __init__(
        self,
        asked: dict[str, Any],
        prepared: Prepared,
        usage: Usage,
        logprobs: ResponseLogprobs,
        *,
        model: str,
        has_timing: bool,
    ) -> None:
        """`asked`: the body as it came."""
        request = prepared.request
        self._asked, self._prepared, self._model = asked, prepared, model
        self._created_s = int(time.time())
        self._reader = reader_of(prepared, 0)
        self._items = ResponseItems(request.request_id)
        self._logprobs = logprobs
        self._usage = usage
        self._has_timing = has_timing
        self._is_cut = False

    async def all_logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Of a whole answer, slice by slice: streams beside it go on in between."""
        found: list[dict[str, Any]] = []
        step = max(1, SLICE_VALUES // (1 + (self._prepared.request.sampling.num_logprobs or 0)))
        for start in range(0, len(delta.tokens) if self._logprobs.are_shown else 0, step):
            found += self._logprobs.of(delta._replace(tokens=delta.tokens[start : start + step]))
            await asyncio.sleep(0)
        return found

    def take(self, delta: TextDelta, logprobs: Sequence[dict[str, Any]] | None = None) -> list[Told]:
        """What the next of the answer adds; `logprobs`: of its tokens, if they are there already."""
        self._usage.add(delta)
        shown = self._logprobs.of(delta) if logprobs is None else logprobs
        told = list(self._items.take(self._reader.read(delta), shown))
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
        asked, sampling = self._asked, self._prepared.request.sampling
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
            "tools": self._tools(),
            "top_logprobs": asked.get("top_logprobs") or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.get("user"),
        }

    def _tools(self) -> list[dict[str, Any]]:
        """As they were asked for, and whether they were strict."""
        calling = self._prepared.calling
        strict = {} if calling is None else {tool.name: tool.strict for tool in calling.use.tools}
        asked = self._asked.get("tools") or []
        default = {"parameters": None, "description": None}
        return [
            default | tool | {"strict": strict.get(tool["name"], tool.get("strict") is not False)} for tool in asked
        ]


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
