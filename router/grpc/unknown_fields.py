"""Fields of a request that this router does not know: a newer client means something by them, so they are refused."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tandem.errors import InvalidRequest


def check_known(request: Message) -> None:
    """Raises InvalidRequest that names the first unknown field."""
    # In one go and without Python's doing: a conversation has thousands of messages.
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() == request.ByteSize():
        return
    place = next(_unknown(request, ()))
    raise InvalidRequest(f"{'.'.join(place)}: unknown field", param=place[0])


def _unknown(message: Message, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    unknown: Any = UnknownFieldSet(message)  # its stubs do not say that it is a sequence
    for found in unknown:
        yield *place, str(found.field_number)
    for field, value in message.ListFields():
        for inner in _messages(field, value):
            yield from _unknown(inner, (*place, field.name))


def _messages(field: Any, value: Any) -> list[Any]:
    if field.type != field.TYPE_MESSAGE:
        return []
    if isinstance(value, Message):
        return [value]
    found = value.values() if hasattr(value, "values") else value
    return [one for one in found if isinstance(one, Message)]
