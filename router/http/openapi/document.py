"""GET /openapi.json: what FastAPI makes of the routes, and what it cannot know of them.

It does not see bodies, which dependencies read (`router.http.body.json_body`), events of streams, refusals, and whether
keys are required. What a schema cannot say (which fields exclude each other) is refused with 400 all the same.
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
"""The first that can say what stands in a stream of events."""
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
"""Those that no route answers with by themselves."""
_OF_FASTAPI = ("HTTPValidationError", "ValidationError")
"""Errors that FastAPI describes wherever there are parameters; ours are 400 in the words of each API."""
_REFUSALS = {
    "400": "A field, a header or the body is wrong; `param` names it",
    "401": "No API key, or a wrong one",
    "403": "A good key, and not for this; without keys, a web page of another origin",
    "404": "No such model or route",
    "408": "The body did not come in time",
    "409": "The client reads the stream elsewhere",
    "413": "The body, or the KV that it needs, is beyond a hard bound",
    "429": "A limit or a queue is full; Retry-After says when to come back",
    "431": "More headers, or longer ones, than are taken",
    "500": "A fault of the cluster's",
    "503": "No worker can take it now; Retry-After says when to come back",
    "504": "Its time ran out",
}
_RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}


def operation_id(route: Any) -> str:
    """Method and path in snake case, for FastAPI's `generate_unique_id_function`."""
    method, path = min(route.methods).lower(), route.path_format
    words = path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([method, *filter(None, words)]) if path != "/" else f"{method}_page"


class OpenApiDocument:
    """Describes one application. It is made once, but for whether keys are required, which may change."""

    def __init__(self, api: FastAPI, guard: AccessGuard, model: ModelInfo) -> None:
        """`api`: all of its routes are there by the first call of `render`."""
        self._api = api
        self._guard = guard
        self._model = model
        self._made: dict[str, Any] | None = None

    def render(self) -> dict[str, Any]:
        """The whole document; it stays the describer's own."""
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
    # What is refused before its route is known, such as a long header, is refused in OpenAI's words.
    schemas = [ref(_ERRORS[shape]), ref(ErrorObject)] if shape in _ERRORS else [ref(ErrorObject)]
    content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    found: dict[str, Any] = {status: {"description": why, "content": content} for status, why in _REFUSALS.items()}
    for status in ("429", "503"):
        found[status] = found[status] | {"headers": _RETRY}
    return found


def _body_schemas(bodies: Collection[type[StrictBody]], model: ModelInfo) -> dict[str, Schema]:
    """Schemas of request bodies, by name, with those that they are made of.

    As pydantic validates them, with the bounds that the sampling parameters and the served model have, and the fields
    that are taken only where they ask for nothing.
    """
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF_TEMPLATE)
    schemas: dict[str, Any] = made["$defs"]
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name, values in asks_for_nothing(body).items():
            properties[name] = {"enum": list(values), "description": "Not served yet: anything else is refused"}
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
    """Of a sampling parameter; those of objects are the objects' own."""
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
