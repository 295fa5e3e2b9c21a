"""The ways of requesting structured outputs over HTTP: OpenAI's `response_format`, vLLM's `structured_outputs` and its
older `guided_*`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from router.http.body.strict_body import StrictBody
from router.text.grammars.structured_output import Shape, StructuredOutput
from tandem.errors import InvalidRequest

_FORMAT = "response_format"
_OUTPUTS = "structured_outputs"


class NamedSchema(StrictBody):
    """OpenAI's format: the schema, and descriptions. It is always enforced; `strict` also forbids unnamed
    properties."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """`{"type": "text" | "json_object" | "json_schema"}`."""

    type: str
    json_schema: NamedSchema | None = None

    def structures(self) -> Iterator[StructuredOutput]:
        """The requested structure. Raises InvalidRequest."""
        if (self.type == Shape.JSON_SCHEMA.value) != (self.json_schema is not None):
            raise InvalidRequest(f"{_FORMAT}: json_schema requires type json_schema, and vice versa", param=_FORMAT)
        if self.json_schema is not None:
            if self.json_schema.schema_ is None:
                raise InvalidRequest(f"{_FORMAT}.json_schema.schema is missing", param=_FORMAT)
            yield StructuredOutput(
                shape=Shape.JSON_SCHEMA,
                value=self.json_schema.schema_,
                param=_FORMAT,
                disables_additional_properties=bool(self.json_schema.strict),
            )
        elif self.type == Shape.JSON_OBJECT.value:
            yield StructuredOutput(shape=Shape.JSON_OBJECT, value=None, param=_FORMAT)
        elif self.type != "text":
            raise InvalidRequest(f"{_FORMAT}: type must be one of text, json_object, json_schema", param=_FORMAT)


class StructuredOutputs(StrictBody):
    """vLLM's format: exactly one of these fields."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structures(self) -> Iterator[StructuredOutput]:
        """Return the requested structures."""
        given = [
            StructuredOutput(shape=shape, value=value, param=_OUTPUTS)
            for shape, value in (
                (Shape.JSON_SCHEMA, self.json_),
                (Shape.JSON_OBJECT, self.json_object or None),
                (Shape.REGEX, self.regex),
                (Shape.CHOICE, self.choice),
                (Shape.GRAMMAR, self.grammar),
            )
            if value is not None
        ]
        if not given:
            raise InvalidRequest(f"{_OUTPUTS}: send json, json_object, regex, choice or grammar", param=_OUTPUTS)
        yield from given


def guided(
    schema: dict[str, Any] | bool | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[StructuredOutput]:
    """Return the structures that vLLM's older fields request."""
    for name, shape, value in (
        ("guided_json", Shape.JSON_SCHEMA, schema),
        ("guided_regex", Shape.REGEX, regex),
        ("guided_choice", Shape.CHOICE, choice),
        ("guided_grammar", Shape.GRAMMAR, grammar),
    ):
        if value is not None:
            yield StructuredOutput(shape=shape, value=value, param=name)


def the_one(structures: Sequence[StructuredOutput]) -> StructuredOutput | None:
    """Return the only structure, if any. Raises InvalidRequest for more than one."""
    if len(structures) > 1:
        first, second = structures[:2]
        where = first.param if first.param == second.param else f"{first.param} and {second.param}"
        raise InvalidRequest(f"{where}: an answer can have only one structure", param=second.param)
    return structures[0] if structures else None
