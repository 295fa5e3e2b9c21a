"""What in a new set of `.proto` files would break processes that have the old one. Pure.

Between two versions that run side by side fields, kinds, values and methods are added, never changed; what goes away
leaves its number and its name reserved.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Every one, by the place of it; none when both may run side by side."""
    then, now = Definitions(old), Definitions(new)
    return [
        *_gone("message", then.messages, now.messages),
        *_gone("enum", then.enums, now.enums),
        *_gone("service", then.services, now.services),
        *(f"{name}: {why}" for name, a, b in _both(then.messages, now.messages) for why in _of_message(a, b)),
        *(f"{name}: {why}" for name, a, b in _both(then.enums, now.enums) for why in _of_enum(a, b)),
        *(f"{name}: {why}" for name, a, b in _both(then.services, now.services) for why in _of_service(a, b)),
    ]


class Definitions:
    """Everything that a set defines, by its full name."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        self.services: dict[str, ServiceDescriptorProto] = {}
        for file in files.file:
            self._take(file.package, file.message_type, file.enum_type)
            self.services |= {f"{file.package}.{service.name}": service for service in file.service}

    def _take(self, scope: str, messages: Iterable[DescriptorProto], enums: Iterable[EnumDescriptorProto]) -> None:
        self.enums |= {f"{scope}.{enum.name}": enum for enum in enums}
        for message in messages:
            self.messages[f"{scope}.{message.name}"] = message
            self._take(f"{scope}.{message.name}", message.nested_type, message.enum_type)


def _gone(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}: the {what} is gone" for name in old if name not in new)


def _both(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    return ((name, old[name], new[name]) for name in old if name in new)


def _of_message(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    numbers, names = {field.number: field for field in new.field}, {field.name for field in new.field}
    for field in old.field:
        if field.number in numbers:
            if (was := _form(field, old)) != (is_now := _form(numbers[field.number], new)):
                yield f"field {field.number} was {was}, is {is_now}"
        elif not _covers(new, field.number) or field.name not in new.reserved_name:
            yield f"field {field.number} {field.name} is gone, and its number and name are not both reserved"
        elif field.name in names:
            yield f"field {field.name} has another number"
    yield from _lost_reservations(old, new, numbers)


def _form(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """All of a field that both sides must agree on."""
    kinds = FieldDescriptorProto
    parts = [kinds.Label.Name(field.label), kinds.Type.Name(field.type), field.type_name]
    if field.proto3_optional:
        parts.append("optional")
    elif field.HasField("oneof_index"):
        parts.append(f"of {message.oneof_decl[field.oneof_index].name}")
    words = [part.removeprefix("LABEL_").removeprefix("TYPE_").lower() for part in parts if part]
    return f"{field.name} ({' '.join(words)})"


def _lost_reservations(
    old: DescriptorProto | EnumDescriptorProto, new: DescriptorProto | EnumDescriptorProto, used: Iterable[int]
) -> Iterator[str]:
    for span in old.reserved_range:
        lacking = [number for number in (span.start, span.end - 1) if not _covers(new, number)]
        if lacking and set(lacking).isdisjoint(used):
            yield f"{lacking[0]} is reserved no more"
    for number in used:
        if _covers(old, number):
            yield f"{number} was reserved, and is used again"
    for name in old.reserved_name:
        if name not in new.reserved_name:
            yield f"{name} is reserved no more"


def _covers(message: DescriptorProto | EnumDescriptorProto, number: int) -> bool:
    """Whether it reserves the number. Of an enumeration both ends of a range belong to it, of a message one."""
    beyond = 1 if isinstance(message, EnumDescriptorProto) else 0
    return any(span.start <= number < span.end + beyond for span in message.reserved_range)


def _of_enum(old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    numbers = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number in numbers:
            if numbers[value.number] != value.name:
                yield f"value {value.number} was {value.name}, is {numbers[value.number]}"
        elif not _covers(new, value.number) or value.name not in new.reserved_name:
            yield f"value {value.number} {value.name} is gone, and its number and name are not both reserved"
    yield from _lost_reservations(old, new, numbers)


def _of_service(old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        if (now := methods.get(method.name)) is None:
            yield f"method {method.name} is gone"
        elif (was := _call(method)) != (is_now := _call(now)):
            yield f"method {method.name} was {was}, is {is_now}"


def _call(method: Any) -> str:
    """What goes in and comes out."""
    given, answer = ("stream " if flag else "" for flag in (method.client_streaming, method.server_streaming))
    return f"{given}{method.input_type} -> {answer}{method.output_type}"
