"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from router.api.answer.choice_text import TextCollector
from router.api.cache_breakpoints import prepare_with_breakpoints
from router.api.request.client_request import ClientRequest
from router.http.anthropic.answer import MessageStream, error_event, whole_message
from router.http.anthropic.body import AnthropicConversation, CountBody, MessagesBody
from router.http.anthropic.objects import MESSAGE_EVENTS, AnthropicErrorObject, MessageObject, TokenCountObject
from router.http.body.client_link import WhileConnected
from router.http.body.json_body import JsonBody
from router.http.body.sse import EventStream, SseResponse
from router.http.openai.generation import trace_and_time
from router.http.openai.whole_answer import WholeResponse
from router.http.openapi.event_streams import typed_events
from router.http.routing.access import ClientAccess
from router.http.routing.generation_calls import GenerationContext
from tandem.errors import InvalidRequest

VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")
"""The second is what clients of late 2026 send; its types for everything served here equal those of the first."""


MESSAGES_PATH = "/v1/messages"


class MessagesRoutes:
    """Path operations of Anthropic's Messages API."""

    def __init__(self, answering: GenerationContext) -> None:
        self._answering = answering
        self._frontend = answering.frontend

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        events = typed_events(MESSAGE_EVENTS, AnthropicErrorObject)
        router.add_api_route(
            MESSAGES_PATH, self.messages, methods=["POST"], response_model=MessageObject, responses={200: events}
        )
        router.add_api_route(
            f"{MESSAGES_PATH}/count_tokens", self.count_tokens, methods=["POST"], response_model=TokenCountObject
        )
        return router

    async def messages(
        self, request: Request, body: Annotated[MessagesBody, Depends(JsonBody(MessagesBody))]
    ) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        _check_version(request)
        fields = trace_and_time(body.fields(request.state.tenant), request)
        talk = body.conversation()
        if body.stream:
            return SseResponse(partial(self._stream, talk, fields), format_error=error_event, closing=b"")
        async with WhileConnected(request.scope, request.receive):
            content = await self._whole(talk, fields)
        return WholeResponse(orjson.dumps(content))

    async def count_tokens(
        self, request: Request, body: Annotated[CountBody, Depends(JsonBody(CountBody))]
    ) -> dict[str, Any]:
        """Count the tokens of the prompt that a conversation makes."""
        _check_version(request)
        self._frontend.check_model(body.model, request.state.tenant)
        fields = body.fields(request.state.tenant)
        with self._frontend.preparing(fields.tenant) as prompts:
            ids = await prompts.encode_chat(
                body.conversation().messages,
                add_generation_prompt=fields.add_generation_prompt,
                tools=fields.tools,
                options=fields.template,
            )
        return {"input_tokens": len(ids)}

    async def _whole(self, talk: AnthropicConversation, fields: ClientRequest) -> dict[str, Any]:
        prepared, text = (
            await prepare_with_breakpoints(self._frontend, talk.messages, talk.marks, fields),
            TextCollector(),
        )
        await self._answering.read_text([prepared], text)
        return whole_message(prepared, self._frontend.answering_model(prepared.request), text.choices()[0])

    async def _stream(self, talk: AnthropicConversation, fields: ClientRequest, events: EventStream) -> None:
        """Stream the answer. Nothing is written before the first token, so that earlier errors keep their HTTP
        status."""
        prepared = await prepare_with_breakpoints(self._frontend, talk.messages, talk.marks, fields)
        model = self._frontend.answering_model(prepared.request)
        await self._answering.read_text([prepared], MessageStream(events, prepared, model))


def _check_version(request: Request) -> None:
    given = request.headers.get(VERSION_HEADER, _VERSIONS[0])
    if given not in _VERSIONS:
        raise InvalidRequest(f"{VERSION_HEADER} must be one of {', '.join(_VERSIONS)}", param=VERSION_HEADER)
