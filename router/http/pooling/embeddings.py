"""POST /v1/embeddings, in OpenAI's format."""

import asyncio
import base64
import sys
from array import array
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from router.api.embeddings import MAX_INPUTS, Embedder, EmbeddingOptions, as_input_error
from router.api.frontend import Frontend
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request_meter import RequestMeter
from router.http.body.client_link import WhileConnected
from router.http.body.json_body import JsonBody
from router.http.body.strict_body import StrictBody
from router.http.openai.generation import trace_and_time
from router.http.openai.objects import EmbeddingList
from router.http.openai.whole_answer import WholeResponse
from router.http.routing.access import ClientAccess
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import InvalidRequest


class EmbeddingBody(StrictBody):
    """The body of an embeddings request."""

    input: Any
    """Text, several texts, token ids or lists of them; the frontend parses it."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    """Which of the model's prompts stands in front of each text."""
    task: str | None = None
    """Jina's name of `prompt_name`."""
    prompt: str | None = None
    """A prompt of the client's own in its place."""
    normalize: bool | None = None
    """Whether vectors have length one; null: as the model's files say."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None

    def fields(self, tenant: str) -> ClientRequest:
        """Convert the fields for the frontend."""
        return ClientRequest(
            model=self.model,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            tenant=tenant,
            add_special_tokens=self.add_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def options(self) -> EmbeddingOptions:
        """Convert what is said of the vectors. Raises InvalidRequest."""
        if self.prompt_name is not None and self.task is not None:
            raise InvalidRequest("send prompt_name or task, not both", param="task")
        return EmbeddingOptions(
            dimensions=self.dimensions,
            prompt_name=self.task if self.prompt_name is None else self.prompt_name,
            prompt=self.prompt,
            normalize=self.normalize,
        )


class EmbeddingRoutes:
    """The path operation of /v1/embeddings."""

    def __init__(self, frontend: Frontend, embedder: Embedder, metrics: RouterMetrics) -> None:
        self._frontend = frontend
        self._embedder = embedder
        self._metrics = metrics

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/v1/embeddings", self.embed, methods=["POST"], response_model=EmbeddingList)
        return router

    async def embed(
        self, request: Request, body: Annotated[EmbeddingBody, Depends(JsonBody(EmbeddingBody))]
    ) -> Response:
        """Return one vector for each input."""
        fields, options = trace_and_time(body.fields(request.state.tenant), request), body.options()
        try:
            inputs = self._frontend.prompts.parse_prompts(body.input, most=MAX_INPUTS)
        except InvalidRequest as error:
            raise as_input_error(error) from error
        async with WhileConnected(request.scope, request.receive):
            prepared = await self._embedder.prepare(inputs, fields, options)
            vectors, usage = await self._embedder.embed(prepared, self._meter, options)
            data = []
            for index, vector in enumerate(vectors):
                shown = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
                one = {"object": "embedding", "index": index, "embedding": shown}
                data.append(orjson.Fragment(orjson.dumps(one)))
                await asyncio.sleep(0)
        tokens, report = usage.prompt_tokens, self._embedder.report
        content = {
            "object": "list",
            "data": data,
            "model": self._frontend.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "pooling": report.method,
            "trained_for_embeddings": report.is_trained,
        }
        return WholeResponse(orjson.dumps(content))

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self._metrics, self._frontend.clock)


def _base64(vector: "array[float]") -> str:
    """Encode the vector as little-endian float32."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
