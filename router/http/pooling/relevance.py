"""POST /v1/rerank, as Jina, Cohere and vLLM have it, and /v1/score, as vLLM has it."""

import time
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from router.api.embeddings import MAX_INPUTS
from router.api.frontend import Frontend
from router.api.relevance import RelevanceQuestion, RelevanceScorer
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request.request_ids import name_request
from router.api.request_meter import RequestMeter
from router.http.body.answer_object import AnswerObject, AnyObject, Count
from router.http.body.client_link import WhileConnected
from router.http.body.json_body import JsonBody
from router.http.body.strict_body import StrictBody, at_most
from router.http.openai.generation import trace_and_time
from router.http.openai.whole_answer import WholeResponse
from router.http.routing.access import ClientAccess
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import InvalidRequest


class DocumentBody(StrictBody):
    """A document of a rerank request as an object."""

    text: str


class _RelevanceBody(StrictBody):
    """Fields common to both requests."""

    model: str | None = None
    instruction: str | None = None
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
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


Texts = Annotated[list[str], at_most(MAX_INPUTS)]


class RerankBody(_RelevanceBody):
    """The body of a rerank request."""

    query: str
    documents: Annotated[list[str | DocumentBody], at_most(MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True

    def question(self) -> RelevanceQuestion:
        """Convert the texts."""
        return RelevanceQuestion(
            queries=(self.query,),
            documents=tuple(one if isinstance(one, str) else one.text for one in self.documents),
            query_param="query",
            document_param="documents",
            instruction=self.instruction,
        )


class ScoreBody(_RelevanceBody):
    """The body of a score request: two texts or lists of texts, under one of three pairs of names."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None

    def question(self) -> RelevanceQuestion:
        """Convert the texts. Raises InvalidRequest unless there are two, under names that belong together."""
        given = {name for name in ("text_1", "text_2", "queries", "documents", "items") if getattr(self, name)}
        for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items")):
            if given == {first, second}:
                return RelevanceQuestion(
                    queries=_as_texts(getattr(self, first)),
                    documents=_as_texts(getattr(self, second)),
                    query_param=first,
                    document_param=second,
                    has_roles=first == "queries",
                    instruction=self.instruction,
                )
        known = "text_1 and text_2, queries and documents, or queries and items"
        raise InvalidRequest(f"send {known}, neither of them empty", param=min(given, default="text_1"))


def _as_texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


class RerankObject(AnswerObject):
    id: str
    model: str
    results: list[AnyObject]
    usage: dict[str, Count]


class ScoreList(AnswerObject):
    id: str
    object: str
    created: Count
    model: str
    data: list[AnyObject]
    usage: dict[str, Count]


class RelevanceRoutes:
    """The path operations of /v1/rerank and /v1/score."""

    def __init__(self, frontend: Frontend, scorer: RelevanceScorer, metrics: RouterMetrics) -> None:
        self._frontend = frontend
        self._scorer = scorer
        self._metrics = metrics

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/v1/rerank", self.rerank, methods=["POST"], response_model=RerankObject)
        router.add_api_route("/v1/score", self.score, methods=["POST"], response_model=ScoreList)
        return router

    async def rerank(self, request: Request, body: Annotated[RerankBody, Depends(JsonBody(RerankBody))]) -> Response:
        """Order documents by relevance for a query."""
        question = body.question()
        scores, num_tokens = await self._scores(request, body, question)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in ranked]
        if body.return_documents:
            for one in results:
                one["document"] = {"text": question.documents[one["index"]]}
        content = {
            "id": f"rerank-{name_request(None)}",
            "model": self._frontend.model.name,
            "results": results,
            "usage": _usage(num_tokens),
        }
        return WholeResponse(orjson.dumps(content))

    async def score(self, request: Request, body: Annotated[ScoreBody, Depends(JsonBody(ScoreBody))]) -> Response:
        """Score pairs of texts."""
        scores, num_tokens = await self._scores(request, body, body.question())
        content = {
            "id": f"score-{name_request(None)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._frontend.model.name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": _usage(num_tokens),
        }
        return WholeResponse(orjson.dumps(content))

    async def _scores(
        self, request: Request, body: _RelevanceBody, question: RelevanceQuestion
    ) -> tuple[list[float], int]:
        fields = trace_and_time(body.fields(request.state.tenant), request)
        async with WhileConnected(request.scope, request.receive):
            return await self._scorer.score(question, fields, self._meter)

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self._metrics, self._frontend.clock)


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
