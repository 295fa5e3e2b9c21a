"""POST /v1/chat/completions and /v1/completions: one client call from body to last byte."""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from router.api.answer.choice_text import TextCollector
from router.api.answer.stream_cursor import StreamCursor
from router.api.answer.stream_ids import LAST_EVENT_ID
from router.api.answer.timing_report import SERVER_TIMING, server_timing, timing_object
from router.api.answer.usage import CallUsage
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedCacheService, prepare_named
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request.request_ids import check_request_id
from router.api.request_meter import RequestMeter
from router.api.selected_choices import SelectedChoices, check_selection, renumbered, select
from router.api.text_stream import read_text
from router.http.body.client_link import WhileConnected
from router.http.body.json_body import JsonBody
from router.http.body.sse import EventStream, SseResponse
from router.http.openai.answer_stream import SseAnswerStream, StreamExtras
from router.http.openai.answers import AnswerFormat, AnswerHead, ChatAnswer, CompletionAnswer
from router.http.openai.chat_messages import conversation
from router.http.openai.objects import (
    ChatCompletionChunkObject,
    ChatCompletionObject,
    CompletionChunkObject,
    CompletionObject,
)
from router.http.openai.prompt_logprobs import PromptLogprobs
from router.http.openai.schemas import ChatBody, CompletionBody, GenerationBody
from router.http.openai.tool_answer import CallingChatAnswer
from router.http.openai.usage import usage_object
from router.http.openai.whole_answer import WholeResponse, whole_content
from router.http.openapi.event_streams import openai_events
from router.http.routing.access import ClientAccess
from router.metrics.router_metrics import RouterMetrics
from router.sandbox.pattern_search import PatternSearch
from router.types.requests import Generator
from router.types.stream_position import StreamPosition
from tandem.errors import InvalidRequest
from tandem.telemetry.tracing import TraceContext, context_from_headers

IDS_HEADER = "X-Tandem-Stream-Ids"
"""`1` requests an `id` with each event. Off by default: some clients only understand `data` lines."""
TIMING_HEADER = "X-Tandem-Timing"
"""`1` requests a `timing` object in the answer, or in the last chunk of a stream, and `Server-Timing`."""
TIMEOUT_HEADER = "X-Tandem-Timeout"
"""Seconds that the client allows for the whole answer; if its first token cannot come by then, it is refused at
once."""
_TIMING, _TIMEOUT, _TRACE = TIMING_HEADER.lower().encode(), TIMEOUT_HEADER.lower().encode(), b"traceparent"
_IDS, _LAST_EVENT = IDS_HEADER.lower().encode(), LAST_EVENT_ID.lower().encode()

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
CHAT_BODY, COMPLETION_BODY = JsonBody(ChatBody), JsonBody(CompletionBody)


class GenerationRoutes:
    """Path operations of chat and plain completions."""

    def __init__(
        self,
        frontend: Frontend,
        generator: Generator,
        metrics: RouterMetrics,
        named: NamedCacheService | None = None,
    ) -> None:
        """`named`: the caches that `cached_content` may name; None: named caches are disabled."""
        self._named = named
        self._frontend = frontend
        self._generator = generator
        self._metrics = metrics
        self._patterns = PatternSearch()

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        chunks, text_chunks = openai_events(ChatCompletionChunkObject), openai_events(CompletionChunkObject)
        router.add_api_route(
            CHAT_PATH, self.chat, methods=["POST"], response_model=ChatCompletionObject, responses={200: chunks}
        )
        router.add_api_route(
            COMPLETIONS_PATH,
            self.completions,
            methods=["POST"],
            response_model=CompletionObject,
            responses={200: text_chunks},
        )
        return router

    async def chat(self, request: Request, body: Annotated[ChatBody, Depends(CHAT_BODY)]) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        sent = _first_headers(request)
        seen = self._seen(sent, body)
        fields = body.chat_fields(request.scope["state"]["tenant"])
        if _TIMEOUT in sent or _TRACE in sent:
            fields = trace_and_time(fields, request)
        if seen is not None:
            fields = replace(fields, last_seen=seen)
        messages = conversation(body.messages)

        async def prepare() -> list[PreparedRequest]:
            if body.cached_content is None:
                return [await self._frontend.prepare_chat(messages, fields)]
            return [await prepare_named(self._frontend, self._named, body.cached_content, messages, fields)]

        def make_answer(prepared: list[PreparedRequest]) -> AnswerFormat:
            head = _head(body, "chatcmpl", prepared[0], seen, self._frontend.answering_model(prepared[0].request))
            tokenizer = self._frontend.tokenizer
            if prepared[0].calling is None and prepared[0].reasoning is None:
                return ChatAnswer(head, prepared, tokenizer)
            return CallingChatAnswer(head, prepared, tokenizer, is_older_form=bool(body.functions))

        return await self._respond(request, sent, body, prepare, make_answer, seen)

    async def completions(
        self, request: Request, body: Annotated[CompletionBody, Depends(COMPLETION_BODY)]
    ) -> Response:
        """Continue one prompt or several, whole or as a stream of events."""
        sent = _first_headers(request)
        seen = self._seen(sent, body)
        fields = trace_and_time(body.completion_fields(request.scope["state"]["tenant"]), request)
        if seen is not None:
            fields = replace(fields, last_seen=seen)
        prompts = self._frontend.prompts.parse_prompts(body.prompt)

        async def prepare() -> list[PreparedRequest]:
            return await self._frontend.prepare_prompts(prompts, fields)

        def make_answer(prepared: list[PreparedRequest]) -> AnswerFormat:
            head = _head(body, "cmpl", prepared[0], seen, self._frontend.answering_model(prepared[0].request))
            return CompletionAnswer(head, prepared, self._frontend.tokenizer)

        return await self._respond(request, sent, body, prepare, make_answer, seen)

    def _seen(self, sent: Mapping[bytes, bytes], body: GenerationBody) -> StreamPosition | None:
        if body.request_id is not None:
            check_request_id(body.request_id, "request_id")
        text = sent.get(_LAST_EVENT) if body.stream else None
        return self._frontend.stream_ids.read(text.decode("latin-1")) if text else None

    async def _respond(
        self,
        request: Request,
        sent: Mapping[bytes, bytes],
        body: GenerationBody,
        prepare: Callable[[], Awaitable[list[PreparedRequest]]],
        make_answer: Callable[[list[PreparedRequest]], AnswerFormat],
        seen: StreamPosition | None,
    ) -> Response:
        options = body.stream_options
        extras = StreamExtras(
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            timing=sent.get(_TIMING) == b"1",
        )
        async with WhileConnected(request.scope, request.receive):
            prepared = await prepare()
            if not body.stream:
                return await self._whole(body, prepared, make_answer, extras)
        cursor = StreamCursor(prepared, self._frontend.stream_ids if _wants_ids(sent) else None, seen)
        if cursor.has_all:
            return SseResponse(_write_nothing)
        # Nothing is written before the first token, so that earlier errors keep their HTTP status.
        run = partial(read_text, self._generator, prepared, self._frontend.tokenizer, self._meter)
        answer, usage = make_answer(prepared), self._usage(prepared)
        return SseResponse(run, into=partial(SseAnswerStream, answer=answer, cursor=cursor, usage=usage, extras=extras))

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self._metrics, self._frontend.clock)

    def _usage(self, prepared: list[PreparedRequest]) -> CallUsage:
        return CallUsage(prepared, self._frontend.clock, self._metrics.usage.prices)

    async def _whole(
        self,
        body: GenerationBody,
        prepared: list[PreparedRequest],
        make_answer: Callable[[list[PreparedRequest]], AnswerFormat],
        extras: StreamExtras,
    ) -> Response:
        ask = body.selection()
        if ask is not None:
            await check_selection(ask, prepared, self._patterns)
        usage, text = self._usage(prepared), TextCollector()
        await read_text(self._generator, prepared, self._frontend.tokenizer, self._meter, text)
        choices, scored_prompts, selected = text.choices(), text.scored_prompts, None
        for choice in choices:
            usage.add(choice)
        if ask is not None:
            selected = await select(ask, prepared, choices, self._patterns)
            prepared, choices = selected.prepared, selected.choices
            scored_prompts = renumbered(ask, scored_prompts)
        scores = None
        if prepared[0].request.scoring is not None:
            scores = PromptLogprobs(body.scores_shown(), prepared, scored_prompts, self._frontend.tokenizer)
        has_logprobs = prepared[0].request.sampling.num_logprobs is not None
        content = await whole_content(make_answer(prepared), choices, scores, has_logprobs=has_logprobs)
        if ask is not None and selected is not None:
            _add_votes(content, selected, ask.candidates)
        content["usage"] = usage_object(usage)
        if not extras.timing:
            return WholeResponse(orjson.dumps(content))
        content["timing"] = timing_object(usage)
        return WholeResponse(orjson.dumps(content), {SERVER_TIMING: server_timing(usage)})


async def _write_nothing(_events: EventStream) -> None:
    """Write nothing: the client has all but the end mark."""


def _add_votes(content: dict[str, Any], selected: SelectedChoices, candidates: int) -> None:
    """Add the result of the vote to elected choices."""
    for choice, vote in zip(content["choices"], selected.votes, strict=False):
        choice["vote"] = {"answer": vote.answer, "votes": vote.num_votes, "of": candidates}


def _first_headers(request: Request) -> Mapping[bytes, bytes]:
    """Return the first header of each name, as `request.headers` does, which searches its list for each."""
    return dict(reversed(request.scope["headers"]))


def _wants_ids(sent: Mapping[bytes, bytes]) -> bool:
    """Whether the client can continue from an id, or already does."""
    return sent.get(_IDS) == b"1" or _LAST_EVENT in sent


def _head(
    body: GenerationBody, prefix: str, first: PreparedRequest, seen: StreamPosition | None, model: str
) -> AnswerHead:
    """Make the head; a continued stream keeps its id and creation time."""
    return AnswerHead(
        id=f"{prefix}-{body.request_id or first.request.request_id}",
        created_s=seen.head.created_s if seen else int(time.time()),
        model=model,
        return_token_ids=bool(body.return_token_ids),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def trace_and_time(fields: ClientRequest, request: Request) -> ClientRequest:
    """Add the headers' trace context and timeout to the fields."""
    sent = dict(request.scope["headers"])
    if _TIMEOUT not in sent and _TRACE not in sent:
        return fields
    trace, time_left_s = _trace(request), _time_left_s(request)
    if trace is None and time_left_s is None:
        return fields
    return replace(fields, trace=trace, by_operator=request.state.sees_all, time_left_s=time_left_s)


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
