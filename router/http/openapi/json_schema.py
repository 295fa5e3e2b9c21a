"""The few forms of JSON schema that /openapi.json is made of."""

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def object_of(required: dict[str, Schema], **more: Schema) -> Schema:
    """These properties, some of which may be absent; others may come one day."""
    return {"type": "object", "required": list(required), "properties": {**required, **more}}


def exactly(required: dict[str, Schema], **more: Schema) -> Schema:
    """The same, and no others."""
    return object_of(required, **more) | {"additionalProperties": False}


def list_of(items: Schema, **bounds: Any) -> Schema:
    """Of any length, unless bounds say another."""
    return {"type": "array", "items": items, **bounds}


def or_null(schema: Schema) -> Schema:
    """Of one plain type, or null."""
    return schema | {"type": [schema["type"], "null"]}


def one_of(*values: str) -> Schema:
    """One of some words."""
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def any_of(*schemas: Schema) -> Schema:
    """One of them at least."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    """A schema of the document, by its name."""
    return {"$ref": f"#/components/schemas/{name}"}
