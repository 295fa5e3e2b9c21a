"""Schemas of request bodies: as pydantic validates them, with the bounds that the sampling parameters and the served
model have, and the fields that are taken only where they ask for nothing.
"""

from collections.abc import Collection
from typing import Any

from pydantic.json_schema import models_json_schema

from router.api.request.client_request import ModelInfo
from router.http.body.strict_body import StrictBody, asks_for_nothing
from router.http.openapi.event_streams import Schema
from tandem.values.sampling import BOUNDS

REF_TEMPLATE = "#/components/schemas/{model}"
_PROMPTS = {"CompletionBody": "prompt", "EmbeddingBody": "input"}


def body_schemas(bodies: Collection[type[StrictBody]], model: ModelInfo) -> dict[str, Schema]:
    """By name, with those that they are made of."""
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=REF_TEMPLATE)
    schemas: dict[str, Any] = made["$defs"]
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name, values in asks_for_nothing(body).items():
            properties[name] = {"enum": list(values), "description": "Not served yet: anything else is refused"}
        if "model" in properties:
            properties["model"]["examples"] = [model.name]
    for schema in schemas.values():
        for name, found in schema.get("properties", {}).items():
            _add_bounds(name, found)
    token = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    ids = {"type": "array", "items": token, "maxItems": model.max_model_len}
    some, text = ids | {"minItems": 1}, {"type": "string"}
    several = [{"type": "array", "items": items, "minItems": 1} for items in (text, some)]
    for name, field in _PROMPTS.items():
        schemas[name]["properties"][field] = {"anyOf": [text, some, *several]}
    schemas["DetokenizeBody"]["properties"]["tokens"] = ids
    return schemas


def _add_bounds(name: str, found: Schema) -> None:
    """Of a sampling parameter; those of objects are the objects' own."""
    if (bound := BOUNDS.get(name)) is None:
        return
    for branch in found.get("anyOf", [found]):
        if branch.get("type") in ("integer", "number"):
            # Who asks of a prompt alone asks for no token.
            low = 0 if name == "max_tokens" else bound.low
            branch |= {"exclusiveMinimum" if bound.open_low else "minimum": low, "maximum": bound.high}
