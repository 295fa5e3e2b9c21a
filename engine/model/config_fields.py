"""Reads fields of untrusted JSON: every error names the file, the field and its bound."""

import json
from collections.abc import Mapping
from typing import Any

from tandem.errors import ConfigError

_MISSING = object()


class Fields:
    """Typed, bounded access to one JSON object."""

    __slots__ = ("_raw", "_where")

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    @property
    def raw(self) -> Mapping[str, Any]:
        """The object itself."""
        return self._raw

    def nested(self, name: str) -> "Fields | None":
        """Access to an object within this one; None where it is absent or null. Raises ConfigError."""
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, is {_show(value)}")
        return Fields(value, f"{self._where}: {name}")

    def only(self, name: str, *allowed: Any) -> None:
        """Raise ConfigError for a field with another value than these, the only ones that are implemented; it may be
        absent or null.
        """
        value = self._raw.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            known = " or ".join(map(_json, allowed))
            raise self.error(name, f"must be {known}, is {_show(value)}")

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self._raw.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field exists and is null."""
        return name in self._raw and self._raw[name] is None

    def get(self, name: str) -> Any:
        """The field's raw value; None when absent."""
        return self._raw.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; `default` stands in for an absent or null field."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer in [{low}, {high}], is {_show(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._value(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not low <= value <= high:  # NaN fails every comparison
            raise self.error(name, f"must be a number in [{low:g}, {high:g}], is {_show(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """A field that is true or false; `default` stands in for an absent or null field."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, is {_show(value)}")
        return value

    def error(self, name: str, problem: str) -> ConfigError:
        """The error to raise about a field."""
        return ConfigError(f"{self._where}: {name} {problem}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._raw.get(name, _MISSING)
        if value is not None and value is not _MISSING:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
