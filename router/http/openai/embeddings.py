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

from router.api.embeddings import MAX_INPUTS, Embedder, as_input_error
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
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig
from tandem.errors import InvalidRequest


class EmbeddingBody(StrictBody):
    """The body of an embeddings request."""

    input: Any
    """Text, several texts, token ids or lists of them; the frontend parses it."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None

    def fields(self, tenant: str) -> ClientRequest:
        """Convert the fields for the frontend."""
        if self.dimensions is not None:
            raise InvalidRequest("dimensions is not supported: this model's vectors have one size", param="dimensions")
        return ClientRequest(
            model=self.model,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            tenant=tenant,
            add_special_tokens=self.add_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class EmbeddingRoutes:
    """The path operation of /v1/embeddings."""

    def __init__(self, frontend: Frontend, generator: Generator, metrics: RouterMetrics, config: RouterConfig) -> None:
        self._frontend = frontend
        self._embedder = Embedder(frontend, generator, most_values=config.max_answer_values)
        self._metrics = metrics

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/v1/embeddings", self.embed, methods=["POST"], response_model=EmbeddingList)
        return router

    async def embed(
        self, request: Request, body: Annotated[EmbeddingBody, Depends(JsonBody(EmbeddingBody))]
    ) -> Response:
        """Return one vector for each input."""
        fields = trace_and_time(body.fields(request.state.tenant), request)
        try:
            inputs = self._frontend.prompts.parse_prompts(body.input, most=MAX_INPUTS)
        except InvalidRequest as error:
            raise as_input_error(error) from error
        async with WhileConnected(request.scope, request.receive):
            prepared = await self._embedder.prepare(inputs, fields)
            vectors, usage = await self._embedder.embed(prepared, self._meter)
            data = []
            for index, vector in enumerate(vectors):
                shown = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
                one = {"object": "embedding", "index": index, "embedding": shown}
                data.append(orjson.Fragment(orjson.dumps(one)))
                await asyncio.sleep(0)
        tokens = usage.prompt_tokens
        content = {
            "object": "list",
            "data": data,
            "model": self._frontend.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
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
