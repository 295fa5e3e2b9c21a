"""Names in the `.proto` files that have changed since the version before. Numbers and types have not.

The binary format carries numbers only, so messages and fields that never travel as JSON may be renamed; services and
methods travel by name and may not. Empty the tables when `python -m tests.previous` has recorded a new version.
"""

from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

FILES = {"tandem/v1/board.proto": "tandem/v1/cluster_state.proto"}
MESSAGES = {
    "Adopt": "TakeOver",
    "Bequest": "CacheOffer",
    "BoardChanges": "CacheChanges",
    "BoardHead": "CacheLogHead",
    "BoardLoad": "RouterLoad",
    "BoardReport": "RedisPublisherReport",
    "BoardShare": "RouterLoadShare",
    "BoardState": "CacheSnapshot",
    "BoardWorker": "WorkerRegistration",
    "Inherit": "FetchCache",
    "Inherited": "CacheFetched",
    "InheritedBlocks": "MigratedBlocks",
    "PinTold": "PinResult",
    "Read": "ScorePrompt",
    "ReadPart": "PromptScores",
    "Settled": "CacheOfferEnded",
    "Supersede": "EndEarlierSessions",
}
FIELDS = {
    "LoadSnapshot": {"board": "redis_publishing"},
    "RouterHello": {"reads_board": "reads_redis"},
    "RouterMessage": {
        "adopt": "take_over",
        "inherit": "fetch_cache",
        "read": "score_prompt",
        "settled": "cache_offer_ended",
        "supersede": "end_earlier_sessions",
    },
    "WorkerMessage": {
        "bequest": "cache_offer",
        "inherited": "cache_fetched",
        "pin_told": "pin_result",
        "read": "prompt_scores",
    },
}


class UnknownName(Exception):
    """A table has a name that the version before does not have."""


def renamed(
    old: FileDescriptorSet,
    *,
    files: Mapping[str, str] = FILES,
    messages: Mapping[str, str] = MESSAGES,
    fields: Mapping[str, Mapping[str, str]] = FIELDS,
) -> FileDescriptorSet:
    """The same definitions under today's names. Raises UnknownName."""
    new = FileDescriptorSet()
    new.CopyFrom(old)
    before = {message.name: message for file in new.file for message in file.message_type}
    known = {file.name for file in new.file} | before.keys()
    known |= {f"{name}.{field.name}" for name, message in before.items() for field in message.field}
    wanted = {*files, *messages, *(f"{name}.{field}" for name, changed in fields.items() for field in changed)}
    if unknown := wanted - known:
        raise UnknownName(f"not in the version before: {', '.join(sorted(unknown))}")
    for file in new.file:
        file.name = files.get(file.name, file.name)
        types = {f".{file.package}.{name}": f".{file.package}.{now}" for name, now in messages.items()}
        for field in _fields(file.message_type):
            field.type_name = types.get(field.type_name, field.type_name)
    for name, message in before.items():
        message.name = messages.get(name, name)
        for field in message.field:
            field.name = fields.get(name, {}).get(field.name, field.name)
    return new


def _fields(messages: Iterable[DescriptorProto]) -> Iterator[FieldDescriptorProto]:
    """All fields of these messages and of those nested in them."""
    for message in messages:
        yield from message.field
        yield from _fields(message.nested_type)
