"""The base of all bodies over HTTP: strict, and explicit about what is not supported.

A field is honoured, or harmless by nature, or refused: never ignored. Fields of OpenAI's and vLLM's APIs that Tandem
does not support are in `NOT_YET` with the values that have no effect; any other unknown field is refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from tandem.errors import InvalidRequest

_MAX_KEYS = 128
_MOST = {"array": "maxItems", "object": "maxProperties"}
NOT_YET: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "echo": (None, False),
    "spaces_between_special_tokens": (None, True),
    "return_tokens_as_token_ids": (None, False),
    "logits_processors": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    # In one message.
    "refusal": (None,),
    "annotations": (None, []),
}


@dataclass(frozen=True, slots=True)
class at_most:  # used in annotations, like annotated-types
    """Bounds the entries of an object or list before they are parsed, and says so in its schema."""

    limit: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the bound before any entry is validated."""
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the bound to each branch of the schema that is an object or list."""
        schema = handler(core)
        for branch in schema.get("anyOf", [schema]):
            if word := _MOST.get(branch.get("type", "")):
                branch[word] = self.limit
        return schema

    def _check(self, value: Any) -> Any:
        if isinstance(value, (dict, list)) and len(value) > self.limit:
            raise ValueError(f"at most {self.limit} entries")
        return value


@dataclass(frozen=True, slots=True)
class OnlyTypes:
    """Restricts a body with a `type` to supported types, reporting another type before anything else that is wrong."""

    param: str
    what: str
    served: frozenset[str]

    def check(self, data: dict[str, Any]) -> None:
        """Check the type. Raises InvalidRequest for another one."""
        kind = data.get("type")
        if isinstance(kind, str) and kind not in self.served:
            only = ", ".join(sorted(self.served))
            reason = f"{self.what} of type {kind[:40]!r} is not supported, only {only}"
            raise InvalidRequest(f"{self.param}: {reason}", param=self.param)


class StrictBody(BaseModel):
    """A body whose values are never coerced to another type, and whose unknown fields are refused."""

    TYPES: ClassVar[OnlyTypes | None] = None

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = NOT_YET
    """Fields of this body that are not supported, with the values that have no effect."""
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_KEYS:
            raise InvalidRequest(f"more than {_MAX_KEYS} fields in one object")
        if cls.TYPES is not None:
            cls.TYPES.check(data)
        known = cls.__pydantic_fields__
        if data.keys() <= known.keys():
            return data
        return {name: value for name, value in data.items() if name in known or not _neutral(cls.NOT_YET, name, value)}


def asks_for_nothing(body: type[StrictBody]) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a body does not support, with the values that it accepts nevertheless."""
    return {name: values for name, values in body.NOT_YET.items() if name not in body.__pydantic_fields__}


def _neutral(not_yet: dict[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    """Whether an unsupported field has no effect. Raises InvalidRequest when it would have one."""
    if name not in not_yet:
        return False
    if any(type(value) is type(one) and value == one for one in not_yet[name]):
        return True
    raise InvalidRequest(f"{name} is not supported yet", param=name)


_BRANCHES = (("str",), ("int",), ("bool",))
"""Last components of error locations in unions."""
_UNKNOWN = "extra_forbidden"
_WORDS = {_UNKNOWN: "unknown field", "model_type": "Input should be an object"}
"""Replacements for error messages that name a class of ours, or are unclear."""


def refusal_of(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """Convert pydantic's errors for the client: the first wrong field, without its value."""
    first, *others = errors
    place = first["loc"]
    outer = place[:-1]
    if place[-1:] in _BRANCHES and first["type"] != _UNKNOWN:
        # Of a union's branches, the one that parsed most of the value was meant.
        branches = [other for other in others if other["loc"][: len(outer)] == outer]
        first = max((first, *branches), key=lambda one: len(one["loc"]))
        place = (*outer, *first["loc"][len(outer) + 1 :])
    # Branches add their type to the location; only the client's names and indices are shown.
    names = [str(part)[:100] for part in place if isinstance(part, int) or "[" not in part]
    what = _WORDS.get(first["type"], first["msg"][:200])
    return InvalidRequest(f"{'.'.join(names)}: {what}", param=names[0] if names else None)
