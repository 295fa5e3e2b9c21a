"""Protobuf messages with every field that this version has."""

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_DEEPEST = 4
_TEXTS = {"dtype": "float32", "code": "Overloaded", "trace": f"00-{1:032x}-{2:016x}-01"}


def filled(message: Message, depth: int = 0, index: int = 0) -> Message:
    """Every field set to something that is not its default, and that tells the fields apart.

    `index`: of messages in a row, whose bytes differ.
    """
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
            continue  # chosen by the caller
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[field.number] = 0.5
        elif field.message_type is not None:
            _fill_message(message, field, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend([_scalar(field, index)] * 2)
        else:
            setattr(message, field.name, _scalar(field, index))
    return message


def _fill_message(message: Message, field: FieldDescriptor, depth: int) -> None:
    if depth >= _DEEPEST:
        return
    if field.is_repeated:
        for index in range(2):
            filled(getattr(message, field.name).add(), depth + 1, index)
    else:
        getattr(message, field.name).SetInParent()
        filled(getattr(message, field.name), depth + 1)


def _scalar(field: FieldDescriptor, index: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            is_text = field.type == FieldDescriptor.TYPE_STRING
            return _TEXTS.get(field.name, field.name) if is_text else bytes([field.number + 100 * index]) * 16
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return field.number / 2
        case FieldDescriptor.CPPTYPE_ENUM:
            return max(value.number for value in field.enum_type.values)
        case _:
            return field.number


def kinds_of(descriptor: Descriptor) -> list[str]:
    """Of a message with one `oneof kind`."""
    return [field.name for field in descriptor.oneofs_by_name["kind"].fields]
