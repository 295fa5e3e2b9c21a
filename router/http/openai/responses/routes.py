"""POST /v1/responses, OpenAI's newer form of a conversation: items in, items out, typed events when streamed.

Nothing is stored: `store: true` and `previous_response_id` are refused, and a broken stream cannot be continued.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from router.api.answer.call_reader import new_answer_parser
from router.api.answer.choice_text import TextCollector, TextDelta, TextSink
from router.api.answer.stream_ids import LAST_EVENT_ID
from router.api.answer.timing_report import SERVER_TIMING, server_timing, timing_object
from router.api.answer.usage import CallUsage
from router.api.request.client_request import PreparedRequest
from router.http.body.client_link import WhileConnected
from router.http.body.errors import error_object
from router.http.body.json_body import JsonBody
from router.http.body.sse import EventStream, SseResponse, event
from router.http.openai.generation import IDS_HEADER, TIMING_HEADER, trace_and_time
from router.http.openai.logprobs import Logprobs
from router.http.openai.prompt_logprobs import SLICE_VALUES
from router.http.openai.responses.items import ResponseEvent, ResponseItems
from router.http.openai.responses.objects import RESPONSE_EVENTS, ResponseObject
from router.http.openai.responses.schemas import ResponsesBody
from router.http.openai.whole_answer import WholeResponse
from router.http.openapi.event_streams import typed_events
from router.http.routing.access import ClientAccess
from router.http.routing.generation_calls import GenerationContext
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, ServingError
from tandem.values.outputs import FinishReason, SampledToken

_FIELD_OF = {"messages": "input", "prompt": "input", "reasoning_effort": "reasoning"}
"""Names in this API of the fields that the frontend's errors name."""


RESPONSES_PATH = "/v1/responses"


class ResponsesRoutes:
    """The path operation of /v1/responses."""

    def __init__(self, answering: GenerationContext) -> None:
        self._answering = answering
        self._frontend = answering.frontend

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        events = typed_events(RESPONSE_EVENTS)
        router.add_api_route(
            RESPONSES_PATH, self.create, methods=["POST"], response_model=ResponseObject, responses={200: events}
        )
        return router

    async def create(
        self, request: Request, body: Annotated[ResponsesBody, Depends(JsonBody(ResponsesBody))]
    ) -> Response:
        """Create a response to items, whole or as a stream of typed events."""
        data: dict[str, Any] = request.state.json_object
        for header in (LAST_EVENT_ID, IDS_HEADER):
            if header in request.headers:
                raise InvalidRequest(f"{header}: streams of this route cannot be continued", param=header)
        prepare = partial(self._prepare, body, request)
        has_timing = request.headers.get(TIMING_HEADER) == "1"

        def make_answer(prepared: PreparedRequest) -> _Answer:
            usage = CallUsage([prepared], self._frontend.clock, self._answering.metrics.usage.prices)
            logprobs = ResponseLogprobs(prepared, self._frontend.tokenizer)
            model = self._frontend.answering_model(prepared.request)
            return _Answer(data, prepared, usage, logprobs, model=model, has_timing=has_timing)

        if body.stream:
            stream = _ResponseStream(self._answering, prepare, make_answer)
            return SseResponse(stream.run, format_error=stream.failed, closing=b"")
        async with WhileConnected(request.scope, request.receive):
            prepared, text = await prepare(), TextCollector()
            await self._answering.read_text([prepared], text)
            answer = make_answer(prepared)
            for delta in text.choices():
                answer.on_delta(delta, await answer.all_logprobs(delta))
        return WholeResponse(orjson.dumps(answer.ended()), headers=answer.headers())

    async def _prepare(self, body: ResponsesBody, request: Request) -> PreparedRequest:
        try:
            try:
                return await self._prepared(body, request, strict=True)
            except InvalidRequest as error:
                if error.param != "tools" or not body.leaves_strict_open:
                    raise
                # Strict is this API's default where it can be enforced; a request that does not ask for it is not
                # refused for it.
                return await self._prepared(body, request, strict=False)
        except InvalidRequest as error:
            field = _FIELD_OF.get(error.param or "")
            if field is None:
                raise
            raise type(error)(f"{field}: {error.message.removeprefix(f'{error.param}: ')}", param=field) from None

    async def _prepared(self, body: ResponsesBody, request: Request, *, strict: bool) -> PreparedRequest:
        fields = trace_and_time(body.fields(request.state.tenant, strict=strict), request)
        return await self._frontend.prepare_chat(body.messages(), fields)


class ResponseLogprobs:
    """Formats the log probabilities of one answer as its tokens arrive."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.are_shown = prepared.request.sampling.num_logprobs is not None
        self._shape = Logprobs(tokenizer)
        self._thoughts = None if prepared.reasoning is None else prepared.reasoning.new_counter()
        self._held: list[SampledToken] = []
        """Tokens that may still turn out to be reasoning."""

    def entries_for(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return entries for the delta's tokens, and for held tokens that turn out to be text."""
        if not self.are_shown:
            return []
        shown = [token for token in delta.tokens for token in self._known(token)]
        if delta.finish is not None and self._thoughts is not None and not self._thoughts.has_thought:
            shown += self._held
            self._held = []
        return self._shape.entries(shown)

    def _known(self, token: SampledToken) -> list[SampledToken]:
        thoughts = self._thoughts
        if thoughts is None or thoughts.has_ended:
            return [token]
        thoughts.add([token.token_id])
        held, self._held = [*self._held, token], []
        if not thoughts.has_ended and not thoughts.has_thought:
            self._held = held
            return []
        return [] if thoughts.has_thought else held


class _Answer:
    """The state of one response: the object so far, and the events of its growth."""

    def __init__(
        self,
        body: dict[str, Any],
        prepared: PreparedRequest,
        usage: CallUsage,
        logprobs: ResponseLogprobs,
        *,
        model: str,
        has_timing: bool,
    ) -> None:
        """`body`: the body as received."""
        request = prepared.request
        self._body, self._prepared, self._model = body, prepared, model
        self._created_s = int(time.time())
        self._reader = new_answer_parser(prepared, 0)
        self._items = ResponseItems(request.request_id)
        self._logprobs = logprobs
        self._usage = usage
        self._has_timing = has_timing
        self._is_cut = False

    async def all_logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return entries for a whole answer, slice by slice, so that concurrent streams are not delayed."""
        found: list[dict[str, Any]] = []
        step = max(1, SLICE_VALUES // (1 + (self._prepared.request.sampling.num_logprobs or 0)))
        for start in range(0, len(delta.tokens) if self._logprobs.are_shown else 0, step):
            found += self._logprobs.entries_for(replace(delta, tokens=delta.tokens[start : start + step]))
            await asyncio.sleep(0)
        return found

    def on_delta(self, delta: TextDelta, logprobs: Sequence[dict[str, Any]] | None = None) -> list[ResponseEvent]:
        """Return the events of the next delta; `logprobs`: of its tokens, if they have been computed."""
        self._usage.add(delta)
        shown = self._logprobs.entries_for(delta) if logprobs is None else logprobs
        events_made = list(self._items.add_pieces(self._reader.read(delta), shown))
        if delta.finish is not None:
            self._is_cut = delta.finish.reason is FinishReason.LENGTH
            events_made += self._items.end(is_cut=self._is_cut or self._reader.has_open_call)
        return events_made

    def opening_object(self) -> dict[str, Any]:
        """Return the object before its first item."""
        return self._object("in_progress")

    def ended(self) -> dict[str, Any]:
        """Return the object after its last item."""
        whole = self._object("incomplete" if self._is_cut else "completed")
        whole |= {"output": self._items.items, "usage": _usage_object(self._usage)}
        whole |= {"incomplete_details": {"reason": "max_output_tokens"}} if self._is_cut else {}
        whole |= {} if self._is_cut else {"completed_at": int(time.time())}
        return whole | ({"timing": timing_object(self._usage)} if self._has_timing else {})

    def headers(self) -> dict[str, str]:
        """Return the headers of an unstreamed response."""
        return {SERVER_TIMING: server_timing(self._usage)} if self._has_timing else {}

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the object of a response that failed."""
        shown = error_object(error)["error"]
        failure = {"code": "server_error", "message": shown["message"]}
        return self._object("failed") | {"output": self._items.items, "error": failure}

    def _object(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self._prepared.request.sampling
        return {
            "id": f"resp_{self._prepared.request.request_id}",
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": self._tools(),
            "top_logprobs": body.get("top_logprobs") or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.get("user"),
        }

    def _tools(self) -> list[dict[str, Any]]:
        """Return the tools as the client sent them, with the value of strict in force."""
        calling = self._prepared.calling
        strict = {} if calling is None else {tool.name: tool.strict for tool in calling.use.tools}
        body = self._body.get("tools") or []
        default = {"parameters": None, "description": None}
        return [default | tool | {"strict": strict.get(tool["name"], tool.get("strict") is not False)} for tool in body]


class _ResponseStream(TextSink):
    """A `TextSink` that writes numbered events."""

    def __init__(
        self,
        answering: GenerationContext,
        prepare: Callable[[], Awaitable[PreparedRequest]],
        make_answer: Callable[[PreparedRequest], _Answer],
    ) -> None:
        self._answering = answering
        self._prepare = prepare
        self._make_answer = make_answer
        self._answer: _Answer | None = None
        self._number = 0

    async def run(self, events: EventStream) -> None:
        """Write the stream. Nothing is written before the first token, so that earlier errors keep their HTTP
        status."""
        prepared = await self._prepare()
        self._answer = answer = self._make_answer(prepared)
        self._events = events
        await self._answering.read_text([prepared], self)
        whole = answer.ended()
        events.write(self._written([{"type": f"response.{whole['status']}", "response": whole}]))

    def failed(self, error: ServingError) -> bytes:
        """Return the last event of a stream that failed."""
        if self._answer is None:
            return b""
        return self._written([{"type": "response.failed", "response": self._answer.failed(error)}])

    def on_delta(self, delta: TextDelta) -> bool:
        if self._answer is None:
            return False
        events_made: list[ResponseEvent] = []
        if not self._number:
            begun = self._answer.opening_object()
            events_made = [{"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")]
        events_made += self._answer.on_delta(delta)
        return bool(events_made) and self._events.write(self._written(events_made))

    async def ready(self) -> None:
        await self._events.ready()

    def _written(self, events_made: Iterable[ResponseEvent]) -> bytes:
        lines = []
        for one in events_made:
            lines.append(event(one | {"sequence_number": self._number}, kind=one["type"]))
            self._number += 1
        return b"".join(lines)


def _usage_object(usage: CallUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
