"""GET /openapi.json: the HTTP door described, made of its table of routes and of the bodies that it validates.

What a schema cannot say (which fields exclude each other, what the served model bounds) is refused with 400 all the
same, in the same words as ever.
"""

from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request

from router.auth import ApiKeys
from router.http.batch_routes import BATCHES, FILES, MOST_LISTED, BatchBody
from router.http.embeddings import EmbeddingBody
from router.http.guard import Guard, Guarded
from router.http.messages_body import CountBody, MessagesBody
from router.http.openapi_answers import ANSWERS, ERROR, SCHEMAS
from router.http.response_schemas import ResponsesBody
from router.http.routes import Routes
from router.http.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.strict_body import StrictBody, asks_for_nothing

_VERSION = "3.1.0"
_UNUSUAL_ERROR = {"type": "object", "required": ["error"]}
"""Of the APIs of others, whose clients expect another form than OpenAI's."""
_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[StrictBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    BATCHES: BatchBody,
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "additionalProperties": False,
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_LIST = [
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED}},
]
_QUERIES: dict[str, list[dict[str, Any]]] = {
    "/debug/decisions": [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
        {"name": "request_id", "in": "query", "schema": {"type": "string", "maxLength": 256}},
    ],
    BATCHES: _LIST,
    FILES: [
        *_LIST,
        {"name": "purpose", "in": "query", "schema": {"type": "string"}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    ],
}
_REFUSALS = {
    "400": "A field, a header or the body is wrong; `param` names it",
    "401": "No API key, or a wrong one",
    "404": "No such model or route",
    "408": "The body did not come in time",
    "409": "The client reads the stream elsewhere",
    "413": "The body, or the KV that it needs, is beyond a hard bound",
    "429": "A limit or a queue is full; Retry-After says when to come back",
    "500": "A fault of the cluster's",
    "503": "No worker can take it now; Retry-After says when to come back",
    "504": "Its time ran out",
}
_RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}


class OpenApiRoute:
    """The handler."""

    def __init__(self, routes: Routes, guard: Guard, keys: ApiKeys, version: str) -> None:
        """`routes`: all that there are when somebody asks."""
        self._routes = routes
        self._guard = guard
        self._keys = keys
        self._version = version
        # Of bodies and answers, which never change: making them takes longer than many a request.
        self._schemas: dict[str, Any] | None = None

    async def show(self, _request: Request) -> dict[str, Any]:
        """The document."""
        paths: dict[str, dict[str, Any]] = {}
        for method, path, guarded, is_usual in self._routes.described():
            shown = path.replace("/*", "/{name}")
            paths.setdefault(shown, {})[method.lower()] = self._operation(method, path, guarded, is_usual=is_usual)
        return {
            "openapi": _VERSION,
            "info": {"title": "Tandem", "version": self._version},
            "paths": dict(sorted(paths.items())),
            "components": {
                "schemas": self._described_bodies(),
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }

    def _described_bodies(self) -> dict[str, Any]:
        if self._schemas is None:
            self._schemas = _schemas()
        return self._schemas

    def _operation(self, method: str, path: str, guarded: Guarded, *, is_usual: bool) -> dict[str, Any]:
        told = (guarded.handler.__doc__ or path).strip().splitlines()[0]
        asks = self._keys.are_asked_for and not (guarded.page is not None and self._guard.is_open(guarded.page))
        found: dict[str, Any] = {
            "operationId": _operation_id(method, path),
            "summary": told,
            "security": [{"key": []}] if asks else [],
            "responses": _responses(path, {"$ref": ERROR} if is_usual else _UNUSUAL_ERROR),
        }
        parameters = list(_QUERIES.get(path, ())) if method == "GET" else []
        if path.endswith("/*"):
            parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
        if parameters:
            found["parameters"] = parameters
        if method == "POST" and path in _BODIES:
            schema = {"$ref": _REF.format(model=_BODIES[path].__name__)}
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        elif method == "POST" and path == FILES:
            found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
        return found


def _operation_id(method: str, path: str) -> str:
    words = path.replace("*", "name").replace(".", "/").split("/")
    return "_".join([method.lower(), *filter(None, words)]) if path != "/" else f"{method.lower()}_page"


def _responses(path: str, error: dict[str, Any]) -> dict[str, Any]:
    given = {media: {"schema": schema} if schema else {} for media, schema in ANSWERS.get(path, {}).items()}
    found: dict[str, Any] = {"200": {"description": "The answer", **({"content": given} if given else {})}}
    for status, told in _REFUSALS.items():
        found[status] = {"description": told, "content": {"application/json": {"schema": error}}}
        if status in ("429", "503"):
            found[status]["headers"] = _RETRY
    return found


def _schemas() -> dict[str, Any]:
    _, made = models_json_schema([(body, "validation") for body in _BODIES.values()], ref_template=_REF)
    schemas: dict[str, Any] = made["$defs"]
    for body in _BODIES.values():
        properties = schemas[body.__name__]["properties"]
        for name, values in asks_for_nothing(body).items():
            properties[name] = {"enum": list(values), "description": "Not served yet: anything else is refused"}
    schemas[CompletionBody.__name__]["properties"]["prompt"] = _PROMPT
    schemas[DetokenizeBody.__name__]["properties"]["tokens"] = {**_IDS, "minItems": 0}
    return schemas | SCHEMAS
