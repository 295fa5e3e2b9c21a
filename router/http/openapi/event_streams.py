"""OpenAPI descriptions of event streams: `itemSchema`, which exists since version 3.2.

For each event the schema describes the `event` line, and the `data`, which is JSON in a string. The end mark of
OpenAI's streams is an event without JSON.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, create_model

from router.http.body.answer_object import ErrorObject, NamedEvent

Schema: TypeAlias = dict[str, Any]

_STREAM = "text/event-stream"
_DONE: Schema = {"type": "object", "required": ["data"], "properties": {"data": {"const": "[DONE]"}}}


def named_event(name: str, /, **fields: Any) -> type[NamedEvent]:
    """Make the model of a typed event's data; `fields`: type annotations."""
    required: dict[str, Any] = {field: (annotation, ...) for field, annotation in fields.items()}
    required["type"] = (Literal[name], ...)
    class_name = "".join(word.title() for word in name.replace(".", "_").split("_")) + "Event"
    return create_model(class_name, __base__=NamedEvent, **required)


def ref(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def openai_events(chunk: type[BaseModel]) -> dict[str, Any]:
    """Describe a stream of `chunk`s, possibly an error, and then the end mark."""
    return _stream([_event(chunk), _event(ErrorObject), _DONE])


def typed_events(events: Sequence[type[NamedEvent]], error: type[BaseModel] | None = None) -> dict[str, Any]:
    """Describe a stream of typed events; `error`: the data of an event of that name."""
    items = [_event(one, one.model_fields["type"].annotation.__args__[0]) for one in events]  # type: ignore[union-attr]
    return _stream([*items, *([_event(error, "error")] if error is not None else [])])


def _event(data: type[BaseModel], name: str | None = None) -> Schema:
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(data)}
    if name is None:
        return {"type": "object", "required": ["data"], "properties": {"data": text, "id": {"type": "string"}}}
    return {"type": "object", "required": ["event", "data"], "properties": {"event": {"const": name}, "data": text}}


def _stream(events: list[Schema]) -> dict[str, Any]:
    return {"content": {_STREAM: {"itemSchema": {"anyOf": events}}}}
