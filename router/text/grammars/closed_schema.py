"""Closes JSON schemas: their objects may have only the properties that the schema names.

JSON Schema allows any other property unless `additionalProperties` says otherwise, and a grammar allows what the schema
does: a model that samples from it keeps inventing properties. Closing a schema adds `additionalProperties: false` to
each object that names its properties and does not state whether others are allowed. A value described in several parts
(`allOf`, `$ref` beside other keywords, `properties` beside `anyOf`) is closed as a whole, over the names of all parts:
each part closed by itself would refuse what the others require.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 25_000
"""Bound per request on parts visited or copied and names collected from them: a fifth of a second of the event loop."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("additionalProperties", "items", "additionalItems", "prefixItems", "contains")
_ALTERNATIVES = ("anyOf", "oneOf")
_NUMBERS_OF_PROPERTIES = ("minProperties", "maxProperties")


def closed_schema(schema: Any) -> Any:
    """Return a copy of the schema with its objects closed.

    A schema is left unchanged if its references are not JSON pointers, or if it has identifiers of its own below the
    root. Raises ValueError for one whose objects have too many parts.
    """
    return closed_schemas([schema])[0]


def closed_schemas(schemas: Iterable[Any]) -> list[Any]:
    """Close several schemas of one request, which share the bound of MAX_STEPS."""
    closed, steps_left = [], MAX_STEPS
    for schema in schemas:
        if not isinstance(schema, dict):
            closed.append(schema)
            continue
        closing = _Closing(schema, steps_left)
        try:
            closed.append(closing.whole())
        except _UnknownReference:
            closed.append(schema)
        steps_left = closing.steps_left
    return closed


class _UnknownReference(Exception):
    """The parts of an object cannot be determined."""


@dataclass(slots=True, kw_only=True)
class _Names:
    """The property names that one object may have, as far as its schema states; dicts keep the order."""

    properties: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_stated: bool = False
    """Whether the schema names properties at all, even an empty set."""

    def add(self, other: "_Names") -> None:
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.is_stated |= other.is_stated


_NO_NAMES = _Names()


class _Closing:
    """The state of closing one schema."""

    def __init__(self, root: dict[str, Any], steps_left: int) -> None:
        self._root = root
        self._prefix = _unused_prefix(root.get("$defs"))
        self._open_parts: dict[str, Any] = {}
        """Copies of the targets of references within parts, by their names among the root's `$defs`."""
        self._open_names: dict[str, str] = {}
        """Those names by reference."""
        self._targets: dict[str, Any] = {}
        self.steps_left = steps_left

    def whole(self) -> dict[str, Any]:
        """Return the closed root, with the open copies that it refers to."""
        made: dict[str, Any] = self._closed(self._root)
        if self._open_parts:
            made["$defs"] = {**made.get("$defs", {}), **self._open_parts}
        return made

    def _closed(self, schema: Any, around: _Names = _NO_NAMES) -> Any:
        """Close the schema of a whole value. `around`: names allowed in the same object by keywords around this one."""
        if schema is True and around.is_stated:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        if self._is_decided(schema):
            return self._opened(schema)
        alternatives = [key for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
        if len(alternatives) == 1:
            return self._closed_alternatives(schema, alternatives[0], around)
        if not around.is_stated and not self._own_names(schema).is_stated and not alternatives:
            if "$ref" in schema and "allOf" not in schema:
                self._target(schema["$ref"])
                # It refers to a schema that is closed at its own place.
                return {**self._opened(schema, but="$ref"), "$ref": schema["$ref"]}
            if "$ref" not in schema and isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
                return {**self._opened(schema, but="allOf"), "allOf": [self._closed(schema["allOf"][0])]}
        return self._closed_object(schema, around)

    def _closed_object(self, schema: dict[str, Any], around: _Names) -> dict[str, Any]:
        names = self._names(schema)
        names.add(around)
        self._count(len(names.properties) + len(names.patterns))
        made: dict[str, Any] = self._opened(schema)
        if not names.is_stated:
            return made
        properties, patterns = made.get("properties", {}), made.get("patternProperties", {})
        more = {name: True for name in names.properties if name not in properties}
        more_patterns = {pattern: True for pattern in names.patterns if pattern not in patterns}
        if any(key in schema for key in _NUMBERS_OF_PROPERTIES):
            least = schema.get("minProperties")
            too_few = isinstance(least, int) and least > len(names.properties) and not names.patterns
            # llguidance counts only properties that are all required.
            if more or more_patterns or too_few:
                return made
        made.pop("unevaluatedProperties", None)
        made["properties"] = {**properties, **more}
        if more_patterns or patterns:
            made["patternProperties"] = {**patterns, **more_patterns}
        return {**made, "additionalProperties": False}

    def _closed_alternatives(self, schema: dict[str, Any], key: str, around: _Names) -> dict[str, Any]:
        """Close each alternative over its own names and those beside it."""
        beside = self._names({name: value for name, value in schema.items() if name != key})
        beside.add(around)
        self._count(len(beside.properties) + len(beside.patterns))
        made: dict[str, Any] = self._opened(schema, but=key)
        made.pop("unevaluatedProperties", None)
        return {**made, key: [self._closed(alternative, beside) for alternative in schema[key]]}

    def _opened(self, schema: Any, *, but: str | None = None) -> Any:
        """Copy a part of a value's schema: left open itself, with nested values closed. `but`: a keyword left
        unchanged."""
        if not isinstance(schema, dict):
            return schema
        if schema is not self._root and any(key in schema for key in ("$id", "$anchor", "$dynamicAnchor")):
            raise _UnknownReference
        self._count(1)
        made = dict(schema)
        for key in _SCHEMAS_BY_NAME:
            if isinstance(value := schema.get(key), dict):
                made[key] = {name: self._closed(inner) for name, inner in value.items()}
        for key in _VALUES:
            if key in schema:
                made[key] = _for_each(self._closed, schema[key])
        for key in ("allOf", *_ALTERNATIVES):
            if key != but and isinstance(schema.get(key), list):
                made[key] = [self._opened(part) for part in schema[key]]
        if but != "$ref" and "$ref" in schema:
            made["$ref"] = self._open_reference(schema["$ref"])
        return made

    def _open_reference(self, reference: Any) -> str:
        target = self._target(reference)
        name = self._open_names.get(reference)
        if name is None:
            name = self._open_names[reference] = f"{self._prefix}{len(self._open_names)}"
            without_definitions = target
            if isinstance(target, dict):
                without_definitions = {k: v for k, v in target.items() if k not in ("$defs", "definitions")}
            self._open_parts[name] = self._opened(without_definitions)
        return f"#/$defs/{name}"

    def _is_decided(self, schema: dict[str, Any]) -> bool:
        """Whether the schema itself states whether other properties are allowed, or does not describe an object."""
        if "additionalProperties" in schema or "propertyNames" in schema:
            return True
        if schema.get("unevaluatedProperties", False) is not False:
            return True
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            return True
        return any(self._is_left_open(part, frozenset()) for part in self._parts(schema))

    def _is_left_open(self, part: Any, seen: frozenset[str]) -> bool:
        """Whether a part explicitly allows other properties, in which case the whole does."""
        if not isinstance(part, dict):
            return False
        if any(part.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")):
            return True
        self._count(1)
        inner = part["allOf"] if isinstance(part.get("allOf"), list) else []
        found = any(self._is_left_open(each, seen) for each in inner)
        if not found and "$ref" in part and part["$ref"] not in seen:
            found = self._is_left_open(self._target(part["$ref"]), seen | {part["$ref"]})
        return found

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        has_more = parts or self._own_names(schema).is_stated or any(key in schema for key in _ALTERNATIVES)
        if "$ref" in schema and has_more:
            parts.append(self._target(schema["$ref"]))
        return parts

    def _own_names(self, schema: dict[str, Any]) -> _Names:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        names = list(properties) if isinstance(properties, dict) else []
        required = schema.get("required")
        names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        return _Names(
            properties=dict.fromkeys(names),
            patterns=dict.fromkeys(patterns) if isinstance(patterns, dict) else {},
            is_stated=isinstance(properties, dict) or isinstance(patterns, dict) or bool(names),
        )

    def _names(self, schema: Any, seen: frozenset[str] = frozenset()) -> _Names:
        """Collect the names of all parts of a value's schema."""
        if not isinstance(schema, dict):
            return _NO_NAMES
        names = self._own_names(schema)
        parts = [part for key in ("allOf", *_ALTERNATIVES) if isinstance(schema.get(key), list) for part in schema[key]]
        found = [self._names(part, seen) for part in parts]
        if (reference := schema.get("$ref")) is not None and reference not in seen:
            found.append(self._names(self._target(reference), seen | {reference}))
        for more in found:
            self._count(len(more.properties) + len(more.patterns) + 1)
            names.add(more)
        return names

    def _target(self, reference: Any) -> Any:
        """Resolve a reference. Raises _UnknownReference unless it is a JSON pointer to a part of the schema."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _UnknownReference
        if reference in self._targets:
            return self._targets[reference]
        at: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and name in at:
                at = at[name]
            elif isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            else:
                raise _UnknownReference
        self._targets[reference] = at
        return at

    def _count(self, num_steps: int) -> None:
        self.steps_left -= num_steps
        if self.steps_left < 0:
            raise ValueError("its objects have too many parts")


def _for_each(change: Callable[[Any], Any], value: Any) -> Any:
    return [change(each) for each in value] if isinstance(value, list) else change(value)


def _unused_prefix(definitions: Any) -> str:
    prefix = "open-"
    while isinstance(definitions, dict) and any(name.startswith(prefix) for name in definitions):
        prefix += "-"
    return prefix
