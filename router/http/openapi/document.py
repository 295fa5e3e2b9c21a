"""GET /openapi.json: FastAPI's description of the routes, and what it cannot know about them.

It does not see bodies, which dependencies read (`router.http.body.json_body`), events of streams, refusals, and whether
keys are required. What a schema cannot express (which fields exclude each other) is refused with 400 anyway.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import RouteContext, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.request.client_request import ModelInfo
from router.http.admin.status import StatusObject
from router.http.anthropic.objects import MESSAGE_EVENTS, AnthropicErrorObject
from router.http.body.answer_object import ErrorObject
from router.http.body.error_formats import anthropic_error, error_shape, google_error
from router.http.body.errors import ErrorShape
from router.http.body.json_body import JsonBody
from router.http.body.strict_body import StrictBody, asks_for_nothing
from router.http.google.body import GoogleErrorObject
from router.http.openai.objects import ChatCompletionChunkObject, CompletionChunkObject
from router.http.openai.responses.objects import RESPONSE_EVENTS
from router.http.openapi.event_streams import Schema, ref
from router.http.routing.access import AccessGuard, access_of
from tandem.values.sampling import BOUNDS, Bound

_REF_TEMPLATE = "#/components/schemas/{model}"
_PROMPTS = {"CompletionBody": "prompt", "EmbeddingBody": "input"}
_APIS = ("/v1/", "/v1beta/")
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SCORES_PROMPTS: dict[str, dict[str, Schema]] = {
    "ChatBody": {"prompt_logprobs": {"type": "integer"}},
    "CompletionBody": {"prompt_logprobs": {"type": "integer"}, "echo": {"const": True}},
}
"""Bodies that may ask for no token, and the fields of which one then asks for something of the prompt."""
_VERSION = "3.2.0"
"""The first version that can describe streams of events."""
_ERRORS: dict[ErrorShape, type[BaseModel]] = {anthropic_error: AnthropicErrorObject, google_error: GoogleErrorObject}
_OTHER_MODELS: Sequence[type[BaseModel]] = (
    ErrorObject,
    AnthropicErrorObject,
    GoogleErrorObject,
    ChatCompletionChunkObject,
    CompletionChunkObject,
    StatusObject,
    *RESPONSE_EVENTS,
    *MESSAGE_EVENTS,
)
"""Statuses that no route lists by itself."""
_OF_FASTAPI = ("HTTPValidationError", "ValidationError")
"""Errors that FastAPI describes wherever there are parameters; ours are 400 in the format of each API."""
_REFUSALS = {
    "400": "Invalid field, header or body; `param` names it",
    "401": "Missing or unknown API key",
    "403": "The key lacks the required rights; without keys, a web page of another origin",
    "404": "No such model or route",
    "408": "The body did not arrive in time",
    "409": "The client reads the stream on another connection",
    "413": "The body, or the KV that it needs, exceeds a hard limit",
    "429": "A rate limit or queue limit is reached; Retry-After says when to retry",
    "431": "The headers are too many or too long",
    "500": "An internal error of the cluster",
    "503": "No worker can accept the request now; Retry-After says when to retry",
    "504": "The request's deadline passed",
}
_RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}


def operation_id(route: Any) -> str:
    """Return method and path in snake case, for FastAPI's `generate_unique_id_function`."""
    method, path = min(route.methods).lower(), route.path_format
    words = path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([method, *filter(None, words)]) if path != "/" else f"{method}_page"


class OpenApiDocument:
    """Describes one application. Built once, except for whether keys are required, which may change."""

    def __init__(self, api: FastAPI, guard: AccessGuard, model: ModelInfo) -> None:
        """`api`: must have all its routes by the first call of `render`."""
        self._api = api
        self._guard = guard
        self._model = model
        self._made: dict[str, Any] | None = None

    def render(self) -> dict[str, Any]:
        """Return the whole document; it stays this object's own."""
        made = self._made = self._made or self._make()
        for route in iter_route_contexts(self._api.routes):
            if route.include_in_schema:
                access = access_of(route)
                scheme: dict[str, list[str]] = {access.scheme_name: []}
                _operation(made, route)["security"] = [scheme] if self._guard.needs_key(access.page) else []
        return made

    def _make(self) -> dict[str, Any]:
        made = get_openapi(
            title=self._api.title, version=self._api.version, openapi_version=_VERSION, routes=self._api.routes
        )
        bodies: dict[str, type[StrictBody]] = {}
        for route in iter_route_contexts(self._api.routes):
            if not route.include_in_schema:
                continue
            operation = _operation(made, route)
            for body in _bodies_of(route):
                bodies[body.__name__] = body
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(body)}}}
            operation["responses"].pop("422", None)
            operation["responses"] |= _refusals(error_shape({"path": route.path, "route": route}))
        _, others = models_json_schema([(one, "serialization") for one in _OTHER_MODELS], ref_template=_REF_TEMPLATE)
        answers = {name: one for name, one in made["components"]["schemas"].items() if name not in _OF_FASTAPI}
        schemas = answers | others["$defs"] | _body_schemas(bodies.values(), self._model)
        made["components"]["schemas"] = dict(sorted(schemas.items()))
        # What clients call first, then what operators read.
        made["paths"] = dict(sorted(made["paths"].items(), key=lambda one: (not one[0].startswith(_APIS), one[0])))
        return made


def _operation(document: dict[str, Any], route: RouteContext) -> dict[str, Any]:
    (method,) = route.methods or set()
    found: dict[str, Any] = document["paths"][route.path_format][method.lower()]
    return found


def _bodies_of(route: RouteContext) -> Iterable[type[StrictBody]]:
    return [one.call.model for one in route.dependant.dependencies if isinstance(one.call, JsonBody)]


def _refusals(shape: ErrorShape) -> dict[str, Any]:
    # Errors raised before the route is known, such as for a long header, are in OpenAI's format.
    schemas = [ref(_ERRORS[shape]), ref(ErrorObject)] if shape in _ERRORS else [ref(ErrorObject)]
    content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    found: dict[str, Any] = {status: {"description": why, "content": content} for status, why in _REFUSALS.items()}
    for status in ("429", "503"):
        found[status] = found[status] | {"headers": _RETRY}
    return found


def _body_schemas(bodies: Collection[type[StrictBody]], model: ModelInfo) -> dict[str, Schema]:
    """Return schemas of request bodies, by name, with those that they refer to.

    As pydantic validates them, with the bounds of the sampling parameters and the served model, and unsupported fields
    that are accepted only with values that have no effect.
    """
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF_TEMPLATE)
    schemas: dict[str, Any] = made["$defs"]
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name, values in asks_for_nothing(body).items():
            properties[name] = {"enum": list(values), "description": "Not supported yet: any other value is refused"}
        if "model" in properties:
            properties["model"]["examples"] = [model.name]
    for schema in schemas.values():
        for name, found in schema.get("properties", {}).items():
            _add_sampling_bounds(name, found)
    for name, fields in _SCORES_PROMPTS.items():
        _allow_no_tokens(schemas[name], fields)
    token = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    ids = {"type": "array", "items": token, "maxItems": model.max_model_len}
    some, text = ids | {"minItems": 1}, {"type": "string"}
    several = [{"type": "array", "items": items, "minItems": 1} for items in (text, some)]
    for name, field in _PROMPTS.items():
        schemas[name]["properties"][field] = {"anyOf": [text, some, *several]}
    schemas["DetokenizeBody"]["properties"]["tokens"] = ids
    return schemas


def _add_sampling_bounds(name: str, found: Schema) -> None:
    """Add the bounds of a sampling parameter; those of objects are their own."""
    bound = BOUNDS.get("max_tokens" if name in _TOKEN_LIMITS else name)
    if name == "min_tokens":
        bound = Bound(0, BOUNDS["max_tokens"].high)
    if bound is None:
        return
    for branch in found.get("anyOf", [found]):
        if branch.get("type") in ("integer", "number"):
            branch |= {"exclusiveMinimum" if bound.open_low else "minimum": bound.low, "maximum": bound.high}


def _allow_no_tokens(body: Schema, fields: dict[str, Schema]) -> None:
    """Allow 0 tokens where one of `fields` asks for something of the prompt."""
    scores = {"anyOf": [{"required": [field], "properties": {field: value}} for field, value in fields.items()]}
    for name in _TOKEN_LIMITS:
        if (limit := body["properties"].get(name)) is not None:
            limit["anyOf"].insert(1, {"const": 0})
            limit["description"] = f"0: only with {' or '.join(fields)}, for the prompt alone"
            asks_for_none = {"required": [name], "properties": {name: {"const": 0}}}
            body.setdefault("allOf", []).append({"if": asks_for_none, "then": scores})
