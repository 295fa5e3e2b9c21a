"""Fifty JSON schemas: nested, recursive, enumerated, with patterns, numbers and choices between them."""

from typing import Any

Schema = dict[str, Any]


def fifty() -> list[Schema]:
    """All different, none of which lets an answer grow for ever."""
    made: list[Schema] = []
    for i in range(10):
        made += [_flat(i), _nested(i), _recursive(i), _patterned(i), _chosen(i)]
    return made


def _object(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _flat(i: int) -> Schema:
    """Numbers within bounds, enumerations, booleans, null."""
    return _object(
        {
            "count": {"type": "integer", "minimum": -i, "maximum": 10 * i + 3},
            "share": {"type": "number", "minimum": 0, "maximum": 1 + i, "multipleOf": 0.25},
            "colour": {"enum": ["red", "green", f"shade {i}", None, i]},
            "sure": {"type": "boolean"},
            "name": _text(4 + i),
        }
    )


def _nested(i: int) -> Schema:
    """Objects in lists in objects."""
    inner = _object({"x": {"type": "integer", "minimum": 0, "maximum": 99}, "label": _text(6)})
    for depth in range(i % 3):
        inner = _object({f"level{depth}": inner, "flag": {"const": depth}})
    return _object(
        {"items": {"type": "array", "items": inner, "minItems": 1 + i % 2, "maxItems": 3}, "note": _text(10)}
    )


def _recursive(i: int) -> Schema:
    """A tree that names itself; what it may hold shrinks an answer sooner or later."""
    node = _object(
        {"value": {"enum": list(range(i + 1))}, "child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}
    )
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _patterned(i: int) -> Schema:
    """Texts that follow regular expressions."""
    return _object(
        {
            "code": {"type": "string", "pattern": f"^[A-Z]{{{1 + i % 4}}}-[0-9]{{2,4}}$"},
            "date": {"type": "string", "format": "date"},
            "mail": {"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,5}\.(org|net)$"},
        }
    )


def _chosen(i: int) -> Schema:
    """One of several shapes, optional parts, and lists of fixed length."""
    circle = _object(
        {
            "kind": {"const": "circle"},
            "radius": {"type": "number", "exclusiveMinimum": 0, "maximum": 50, "multipleOf": 0.5},
        }
    )
    box = _object({"kind": {"const": "box"}, "sides": {"type": "array", "items": {"enum": [1, 2, i]}, "maxItems": 2}})
    return {
        "type": "object",
        "properties": {"shape": {"anyOf": [circle, box]}, "size": {"enum": ["s", "m", "l"]}, "tag": _text(3 + i)},
        "required": ["shape"],
        "additionalProperties": False,
    }
