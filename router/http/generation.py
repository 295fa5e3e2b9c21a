"""POST /v1/chat/completions and /v1/completions: one client call from body to last byte."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.frontend import ClientFields, Frontend, Prepared
from router.http.answers import Answer, AnswerHead, ChatAnswer, CompletionAnswer
from router.http.cursor import StreamCursor, last_seen, wants_ids
from router.http.json_body import BodyBounds, read_object
from router.http.middleware import check_request_id
from router.http.schemas import ChatBody, CompletionBody, GenerationBody, validate
from router.http.sse import SseResponse, event, unless_disconnected
from router.metrics import RequestMeter, RouterMetrics
from router.requests import Generator
from router.stream_ids import StreamIds, StreamPosition
from router.text_stream import TextDelta, collect, stream_all
from router.usage import Usage
from tandem.errors import InvalidRequest
from tandem.tracing import TraceContext, context_from_headers

TIMING_HEADER = "X-Tandem-Timing"
"""`1` asks for a `timing` object in the answer, or in the last chunk of a stream."""
TIMEOUT_HEADER = "X-Tandem-Timeout"
"""Seconds that the client gives the whole answer; if its first token cannot come by then, it is refused at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """How to prepare and show one call, and what its answer carries besides."""

    prepare: Callable[[], Awaitable[list[Prepared]]]
    show: Callable[[list[Prepared]], Answer]
    include_usage: bool
    continuous_usage: bool
    timing: bool
    ids: StreamIds | None
    seen: StreamPosition | None


class GenerationRoutes:
    """The handlers of the two routes."""

    def __init__(
        self, frontend: Frontend, generator: Generator, metrics: RouterMetrics, *, max_body_bytes: int
    ) -> None:
        self._frontend = frontend
        self._generator = generator
        self._metrics = metrics
        self._bounds = BodyBounds.of(max_body_bytes, frontend.model.max_model_len)

    async def chat(self, request: Request) -> Response:
        """A conversation."""
        body = validate(ChatBody, await self._read(request))
        seen = self._seen(request, body)
        fields = _with_headers(body.chat_fields(request.state.tenant), request, seen)
        messages = [turn.message() for turn in body.messages]

        async def prepare() -> list[Prepared]:
            return [await self._frontend.prepare_chat(messages, fields)]

        def show(prepared: list[Prepared]) -> Answer:
            head = _head(body, "chatcmpl", prepared[0], seen, self._frontend.model.name)
            return ChatAnswer(head, prepared, self._frontend.tokenizer)

        return await self._respond(request, body, prepare, show, seen)

    async def completions(self, request: Request) -> Response:
        """Plain prompts."""
        body = validate(CompletionBody, await self._read(request))
        seen = self._seen(request, body)
        fields = _with_headers(body.completion_fields(request.state.tenant), request, seen)
        prompts = self._frontend.parse_prompts(body.prompt)

        async def prepare() -> list[Prepared]:
            return await self._frontend.prepare_prompts(prompts, fields)

        def show(prepared: list[Prepared]) -> Answer:
            head = _head(body, "cmpl", prepared[0], seen, self._frontend.model.name)
            return CompletionAnswer(head, prepared, self._frontend.tokenizer)

        return await self._respond(request, body, prepare, show, seen)

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._bounds)

    def _seen(self, request: Request, body: GenerationBody) -> StreamPosition | None:
        if body.request_id is not None:
            check_request_id(body.request_id, "request_id")
        return last_seen(request, self._frontend.stream_ids) if body.stream else None

    async def _respond(
        self,
        request: Request,
        body: GenerationBody,
        prepare: Callable[[], Awaitable[list[Prepared]]],
        show: Callable[[list[Prepared]], Answer],
        seen: StreamPosition | None,
    ) -> Response:
        options = body.stream_options
        call = _Call(
            prepare=prepare,
            show=show,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            timing=request.headers.get(TIMING_HEADER) == "1",
            ids=self._frontend.stream_ids if wants_ids(request) else None,
            seen=seen,
        )
        if body.stream:
            return SseResponse(self._events(call))
        content = await unless_disconnected(request.receive, self._whole(call))
        return Response(orjson.dumps(content), media_type="application/json")

    def _deltas(self, prepared: list[Prepared]) -> AsyncGenerator[TextDelta, None]:
        return stream_all(self._generator, prepared, self._frontend.tokenizer, self._meter)

    def _meter(self, one: Prepared) -> RequestMeter:
        request = one.request
        return RequestMeter(
            self._metrics,
            self._frontend.clock,
            prompt_tokens=len(request.prompt_token_ids),
            choices=request.num_choices,
            span=request.span,
        )

    async def _whole(self, call: _Call) -> dict[str, Any]:
        prepared = await call.prepare()
        usage = Usage(prepared)
        async with aclosing(self._deltas(prepared)) as deltas:
            choices = await collect(deltas)
        for choice in choices:
            usage.add(choice)
        content = call.show(prepared).whole(choices)
        content["usage"] = _usage(usage)
        if call.timing:
            content["timing"] = _timing(usage)
        return content

    async def _events(self, call: _Call) -> AsyncGenerator[bytes, None]:
        """The stream. Nothing comes before the first token, so that earlier errors keep their HTTP status."""
        prepared = await call.prepare()
        cursor = StreamCursor(prepared, call.ids, call.seen)
        if cursor.has_all:
            return
        answer, usage, opened = call.show(prepared), Usage(prepared), cursor.is_continued
        extra: dict[str, Any] = {"usage": None} if call.include_usage else {}
        async with aclosing(self._deltas(prepared)) as deltas:
            async for delta in deltas:
                usage.add(delta)
                chunks = [] if cursor.has_ended(delta.choice_index) else answer.chunks(delta)
                if call.continuous_usage:
                    extra["usage"] = _usage(usage)
                if call.timing and usage.complete and not call.include_usage and chunks:
                    chunks[-1]["timing"] = _timing(usage)
                events = [] if opened else _opening(answer, cursor, extra)
                opened = True
                cursor.moved(delta)
                events += [event(chunk | extra, cursor.id_of(chunk)) for chunk in chunks]
                if events:
                    yield b"".join(events)
        if call.include_usage:
            timing = {"timing": _timing(usage)} if call.timing else {}
            ending = answer.ending()
            yield event(ending | {"usage": _usage(usage)} | timing, cursor.id_of(ending))


def _opening(answer: Answer, cursor: StreamCursor, extra: dict[str, Any]) -> list[bytes]:
    """The last one alone has an id: whoever has not all of them begins anew."""
    chunks = answer.opening()
    return [event(c | extra, cursor.id_of(c) if c is chunks[-1] else None) for c in chunks]


def _head(body: GenerationBody, prefix: str, first: Prepared, seen: StreamPosition | None, model: str) -> AnswerHead:
    """A stream that is continued keeps its name and its time."""
    return AnswerHead(
        id=f"{prefix}-{body.request_id or first.request.request_id}",
        created_s=seen.head.created_s if seen else int(time.time()),
        model=model,
        return_token_ids=bool(body.return_token_ids),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
    )


def _with_headers(fields: ClientFields, request: Request, seen: StreamPosition | None) -> ClientFields:
    return replace(fields, trace=_trace(request), last_seen=seen, time_left_s=_time_left_s(request))


def _time_left_s(request: Request) -> float | None:
    if (text := request.headers.get(TIMEOUT_HEADER)) is None:
        return None
    try:
        time_left_s = float(text)
    except ValueError:
        time_left_s = 0.0
    if not 0.0 < time_left_s < float("inf"):
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    return time_left_s


def _trace(request: Request) -> TraceContext | None:
    headers = request.headers
    return context_from_headers(headers.getlist("traceparent"), headers.getlist("tracestate"))


def _usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _timing(usage: Usage) -> dict[str, Any]:
    """Seconds by phase, measured by the workers."""
    times = usage.times()
    return {
        "queue_s": round(times.prefill_queue_s + times.decode_queue_s, 6),
        "prefill_s": round(times.prefill_s, 6),
        "transfer_s": round(times.transfer_s, 6),
        "decode_s": round(times.decode_s, 6),
        "cached_tokens": usage.cached_tokens,
    }
