"""What may be sent to each route, for /openapi.json: bodies as they are validated, parameters of queries and paths."""

from typing import Any

from pydantic.json_schema import models_json_schema

from router.api.request.client_request import ModelInfo
from router.http.anthropic.body import CountBody, MessagesBody
from router.http.body.strict_body import StrictBody, asks_for_nothing
from router.http.google.body import CacheExpiry, CreateBody
from router.http.google.cached_contents import PATH
from router.http.openai.batches import BATCHES, FILES, MOST_LISTED, BatchBody
from router.http.openai.embeddings import EmbeddingBody
from router.http.openai.responses.schemas import ResponsesBody
from router.http.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.openapi.json_schema import TEXT, Schema, exactly, list_of, one_of, ref
from tandem.values.sampling import BOUNDS

_BODIES: dict[str, type[StrictBody]] = {
    "POST /v1/chat/completions": ChatBody,
    "POST /v1/completions": CompletionBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/messages/count_tokens": CountBody,
    "POST /v1/responses": ResponsesBody,
    "POST /v1/embeddings": EmbeddingBody,
    "POST /tokenize": TokenizeBody,
    "POST /detokenize": DetokenizeBody,
    f"POST {BATCHES}": BatchBody,
    f"POST {PATH}": CreateBody,
    f"PATCH {PATH}/{{id}}": CacheExpiry,
}
_UPLOAD = exactly({"file": {"type": "string", "format": "binary"}, "purpose": one_of("batch")})
_NAMES = {"/v1/models": "model", FILES: "file_id", BATCHES: "batch_id", PATH: "id"}
"""What stands in place of a `*` in the table of routes, by what is before it."""


def _query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _number(most: int, least: int = 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


_SECONDS = _query("seconds", {"type": "number", "exclusiveMinimum": 0, "maximum": 600})
_LIST = [_query("after", TEXT), _query("limit", _number(MOST_LISTED))]
_QUERIES: dict[str, list[dict[str, Any]]] = {
    "GET /debug/decisions": [_query("limit", _number(1000)), _query("request_id", TEXT | {"maxLength": 256})],
    "GET /readyz": [_query("exclude", one_of("workers"))],
    "POST /debug/profile/router": [_SECONDS, _query("format", one_of("speedscope", "collapsed", "svg"))],
    "POST /debug/profile/worker": [
        _query("worker", TEXT) | {"required": True},
        _query("steps", _number(10_000)),
        _SECONDS,
    ],
    f"GET {BATCHES}": _LIST,
    f"GET {FILES}": [*_LIST, _query("purpose", TEXT), _query("order", one_of("asc", "desc"))],
    f"GET {PATH}": [_query("pageSize", _number(999_999, 0)), _query("pageToken", TEXT | {"pattern": "^[0-9]{0,6}$"})],
    f"PATCH {PATH}/{{id}}": [_query("updateMask", one_of("ttl", "expireTime"))],
}


def shown_path(path: str) -> str:
    """A path of the table of routes, in OpenAPI's words."""
    begin, star, end = path.partition("/*")
    return f"{begin}/{{{_NAMES[begin]}}}{end}" if star else path


def parameters_of(operation: str) -> list[dict[str, Any]]:
    """Of `METHOD path`: what is in the path, then in the query."""
    in_path = [part[1:-1] for part in operation.split("/") if part.startswith("{")]
    made = [{"name": name, "in": "path", "required": True, "schema": TEXT | {"minLength": 1}} for name in in_path]
    return [*made, *_QUERIES.get(operation, ())]


def body_of(operation: str) -> dict[str, Any] | None:
    """What is sent with `METHOD path`, by its media type; None: nothing."""
    if operation == f"POST {FILES}":
        return {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    if (body := _BODIES.get(operation)) is None:
        return None
    return {"required": True, "content": {"application/json": {"schema": ref(body.__name__)}}}


def body_schemas(model: ModelInfo) -> dict[str, Schema]:
    """By name; token ids are those of the served model."""
    template = ref("{model}")["$ref"]
    _, made = models_json_schema([(body, "validation") for body in _BODIES.values()], ref_template=template)
    schemas: dict[str, Any] = made["$defs"]
    for body in _BODIES.values():
        properties = schemas[body.__name__]["properties"]
        for name, values in asks_for_nothing(body).items():
            properties[name] = {"enum": list(values), "description": "Not served yet: anything else is refused"}
        if "model" in properties:
            properties["model"]["examples"] = [model.name]
    for schema in schemas.values():
        for name, found in schema.get("properties", {}).items():
            _bound(name, found)
    ids = list_of({"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}, maxItems=model.max_model_len)
    some = ids | {"minItems": 1}
    prompt = {"anyOf": [TEXT, some, list_of(TEXT, minItems=1), list_of(some, minItems=1)]}
    schemas[CompletionBody.__name__]["properties"]["prompt"] = prompt
    schemas[EmbeddingBody.__name__]["properties"]["input"] = prompt
    schemas[DetokenizeBody.__name__]["properties"]["tokens"] = ids
    return schemas


def _bound(name: str, found: Schema) -> None:
    """Say the bounds of a sampling field; those of objects are the objects' own."""
    if (bound := BOUNDS.get(name)) is None:
        return
    for branch in found.get("anyOf", [found]):
        if branch.get("type") in ("integer", "number"):
            # Who asks of a prompt alone asks for no token.
            low = 0 if name == "max_tokens" else bound.low
            branch |= {"exclusiveMinimum" if bound.open_low else "minimum": low, "maximum": bound.high}
