"""POST /v1/chat/completions and /v1/completions: one client call from body to last byte."""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.frontend import Frontend, Prepared
from router.http.answers import Answer, AnswerHead, ChatAnswer, CompletionAnswer
from router.http.json_body import BodyBounds, read_object
from router.http.middleware import check_request_id
from router.http.schemas import ChatBody, CompletionBody, GenerationBody, validate
from router.http.sse import SseResponse, event, unless_disconnected
from router.metrics import RequestMeter, RouterMetrics
from router.requests import Generator
from router.text_stream import TextDelta, collect, stream_all
from router.usage import Usage
from tandem.tracing import TraceContext, context_from_headers

TIMING_HEADER = "X-Tandem-Timing"
"""`1` asks for a `timing` object in the answer, or in the last chunk of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """How to prepare and show one call, and what its answer carries besides."""

    prepare: Callable[[], Awaitable[list[Prepared]]]
    show: Callable[[list[Prepared]], Answer]
    include_usage: bool
    continuous_usage: bool
    timing: bool


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
        fields = replace(body.chat_fields(request.state.tenant), trace=_trace(request))
        messages = [turn.message() for turn in body.messages]
        head = self._head(body, "chatcmpl")

        async def prepare() -> list[Prepared]:
            return [await self._frontend.prepare_chat(messages, fields)]

        def show(prepared: list[Prepared]) -> Answer:
            return ChatAnswer(head, prepared, self._frontend.tokenizer)

        return await self._respond(request, body, prepare, show)

    async def completions(self, request: Request) -> Response:
        """Plain prompts."""
        body = validate(CompletionBody, await self._read(request))
        fields = replace(body.completion_fields(request.state.tenant), trace=_trace(request))
        prompts = self._frontend.parse_prompts(body.prompt)
        head = self._head(body, "cmpl", echo=bool(body.echo))

        async def prepare() -> list[Prepared]:
            return await self._frontend.prepare_prompts(prompts, fields)

        def show(prepared: list[Prepared]) -> Answer:
            return CompletionAnswer(head, prepared, self._frontend.tokenizer)

        return await self._respond(request, body, prepare, show)

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._bounds)

    def _head(self, body: GenerationBody, prefix: str, *, echo: bool = False) -> AnswerHead:
        if body.request_id is not None:
            check_request_id(body.request_id, "request_id")
        return AnswerHead(
            id=f"{prefix}-{body.request_id or secrets.token_hex(16)}",
            created_s=int(time.time()),
            model=self._frontend.model.name,
            return_token_ids=bool(body.return_token_ids),
            echo=echo,
        )

    async def _respond(
        self,
        request: Request,
        body: GenerationBody,
        prepare: Callable[[], Awaitable[list[Prepared]]],
        show: Callable[[list[Prepared]], Answer],
    ) -> Response:
        options = body.stream_options
        call = _Call(
            prepare=prepare,
            show=show,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            timing=request.headers.get(TIMING_HEADER) == "1",
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
        answer, usage, opened = call.show(prepared), Usage(prepared), False
        extra: dict[str, Any] = {"usage": None} if call.include_usage else {}
        async with aclosing(self._deltas(prepared)) as deltas:
            async for delta in deltas:
                chunks = answer.chunks(delta)
                if not opened:
                    opened, chunks = True, [*answer.opening(), *chunks]
                usage.add(delta)
                if call.continuous_usage:
                    extra["usage"] = _usage(usage)
                if call.timing and usage.complete and not call.include_usage:
                    chunks[-1]["timing"] = _timing(usage)
                if chunks:
                    yield b"".join(event(chunk | extra) for chunk in chunks)
        if call.include_usage:
            timing = {"timing": _timing(usage)} if call.timing else {}
            yield event(answer.ending() | {"usage": _usage(usage)} | timing)


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
