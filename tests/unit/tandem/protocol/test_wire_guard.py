"""The wire may only grow between two versions; additions belong to a new version."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from kv_transfer.protocol import versions as handoff_versions
from tandem.protocol import session_versions
from tandem.protocol.version_negotiation import VersionRange
from tandem.v1 import cluster_state_pb2, common_pb2, handoff_pb2, inference_pb2, pins_pb2, session_pb2
from tests.previous import release
from tests.previous.breaks import Definitions, breaks
from tests.previous.renames import UnknownName, renamed

FILES = (cluster_state_pb2, common_pb2, handoff_pb2, inference_pb2, pins_pb2, session_pb2)
OF_CLIENTS = frozenset({".tandem.v1.EarlyStopping"})
"""Enumerations that neither the session nor the hand-off carries."""


def previous() -> FileDescriptorSet:
    """The previous version, under today's names."""
    return renamed(release.descriptors())


def current() -> FileDescriptorSet:
    files = FileDescriptorSet()
    for module in FILES:
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def test_wire_guard_previous_definitions_are_unchanged() -> None:
    assert {file.name for file in previous().file} <= {file.name for file in current().file}
    assert breaks(previous(), current()) == []


def test_wire_guard_renaming_unknown_name_is_refused() -> None:
    for wrong in (
        {"files": {"tandem/v1/none.proto": "a.proto"}},
        {"messages": {"Nothing": "Something"}},
        {"fields": {"Submit": {"nothing": "something"}}},
    ):
        with pytest.raises(UnknownName, match=r"not in the version before: .*(none|[Nn]othing)"):
            renamed(release.descriptors(), **wrong)


def test_wire_guard_renamed_definitions_differ_only_in_names() -> None:
    fields = {"Submit": {"attempt": "number"}}
    new = renamed(release.descriptors(), files={}, messages={"Cancel": "Stop"}, fields=fields)
    assert breaks(release.descriptors(), new) == [
        "tandem.v1.Cancel: the message is gone",
        "tandem.v1.RouterMessage: field 3 was cancel (optional message .tandem.v1.cancel of kind), "
        "is cancel (optional message .tandem.v1.stop of kind)",
        "tandem.v1.Submit: field 2 was attempt (optional uint32), is number (optional uint32)",
    ]


def test_wire_guard_versions_overlap_with_previous() -> None:
    assert session_versions.SPOKEN.negotiate(release.spoken().session) == release.spoken().session.newest
    assert handoff_versions.SPOKEN.negotiate(release.spoken().handoff) == release.spoken().handoff.newest


def new_kinds(old: FileDescriptorSet, new: FileDescriptorSet, message: str) -> set[str]:
    then, now = (
        {field.name for field in Definitions(files).messages[message].field if not field.proto3_optional}
        for files in (old, new)
    )
    return now - then


def too_early(old: FileDescriptorSet, new: FileDescriptorSet, before: int, since: Mapping[str, Mapping[str, int]]):
    """New kinds of message that are assigned to a version without them."""
    return {
        f"{message}.{kind}"
        for message, kinds in since.items()
        for kind in new_kinds(old, new, message) & kinds.keys()
        if kinds[kind] <= before
    }


SESSION = {
    "tandem.v1.RouterMessage": session_versions.ROUTER_KINDS,
    "tandem.v1.WorkerMessage": session_versions.WORKER_KINDS,
}
HANDOFF = {"tandem.v1.HandoffMessage": handoff_versions.KINDS}


def test_wire_guard_new_kind_needs_new_version() -> None:
    old, before = previous(), release.spoken()
    assert not too_early(old, current(), before.session.newest, SESSION)
    assert not too_early(old, current(), before.handoff.newest, HANDOFF)


def test_wire_guard_new_kind_listed_as_old_is_detected() -> None:
    new = release.descriptors()
    field = Definitions(new).messages["tandem.v1.RouterMessage"].field.add(name="novelty", number=99)
    field.oneof_index = 0
    for version, found in ((3, {"tandem.v1.RouterMessage.novelty"}), (4, set())):
        since = {"tandem.v1.RouterMessage": {**session_versions.ROUTER_KINDS, "novelty": version}}
        assert too_early(release.descriptors(), new, 3, since) == found


def new_values(old: FileDescriptorSet, new: FileDescriptorSet) -> set[str]:
    then, now = Definitions(old).enums, Definitions(new).enums
    return {
        f"{name}.{value.name}"
        for name, enum in now.items()
        if f".{name}" not in OF_CLIENTS and name in then
        for value in enum.value
        if value.number not in {one.number for one in then[name].value}
    }


def raised(now: VersionRange, before: VersionRange) -> bool:
    return now.newest > before.newest


def test_wire_guard_new_enum_value_needs_new_version() -> None:
    before = release.spoken()
    both = ((session_versions.SPOKEN, before.session), (handoff_versions.SPOKEN, before.handoff))
    assert not new_values(release.descriptors(), current()) or all(raised(*pair) for pair in both)


def test_wire_guard_new_enum_value_is_detected() -> None:
    new = release.descriptors()
    Definitions(new).enums["tandem.v1.FinishReason"].value.add(name="FINISH_REASON_NEW", number=77)
    assert new_values(release.descriptors(), new) == {"tandem.v1.FinishReason.FINISH_REASON_NEW"}
    assert not raised(VersionRange(3, 4), VersionRange(3, 4))


# Whether each way to break is noticed


def field_of(message: DescriptorProto, name: str) -> FieldDescriptorProto:
    return next(field for field in message.field if field.name == name)


def remove(repeated: Any, name: str) -> None:
    del repeated[next(i for i, one in enumerate(repeated) if one.name == name)]


def reserve(message: Any, number: int, name: str, *, beyond: int = 1) -> None:
    message.reserved_range.add(start=number, end=number + beyond)
    message.reserved_name.append(name)


def changes() -> Iterator[tuple[str, Callable[[Definitions], Any], str]]:
    def submit(d: Definitions) -> DescriptorProto:
        return d.messages["tandem.v1.Submit"]

    kinds = FieldDescriptorProto
    yield "type", lambda d: setattr(field_of(submit(d), "attempt"), "type", kinds.TYPE_SINT32), "was attempt"
    yield "label", lambda d: setattr(field_of(submit(d), "attempt"), "label", kinds.LABEL_REPEATED), "repeated"
    yield "name", lambda d: setattr(field_of(submit(d), "attempt"), "name", "number"), "is number"
    yield "presence", lambda d: field_of(submit(d), "timeout_s").ClearField("proto3_optional"), "optional"
    yield "message", lambda d: setattr(field_of(submit(d), "sampling"), "type_name", ".tandem.v1.Pin"), "tandem.v1.pin"
    yield (
        "out of oneof",
        lambda d: field_of(d.messages["tandem.v1.RouterMessage"], "pin").ClearField("oneof_index"),
        "of",
    )
    yield "removed", lambda d: remove(submit(d).field, "attempt"), "field 2 attempt is gone"
    yield "number", lambda d: setattr(field_of(submit(d), "attempt"), "number", 70), "field 2 attempt is gone"
    yield "no message", lambda d: submit(d).Clear(), "tandem.v1.Submit: the message is gone"
    enum = "tandem.v1.WorkerRole"
    yield "value", lambda d: setattr(d.enums[enum].value[1], "name", "COOK"), "value 1 was WORKER_ROLE_PREFILL"
    yield "no value", lambda d: remove(d.enums[enum].value, "WORKER_ROLE_DECODE"), "value 2 WORKER_ROLE_DECODE is gone"
    worker = "tandem.v1.Worker"
    yield "no method", lambda d: remove(d.services[worker].method, "Session"), "method Session is gone"
    yield "one way", lambda d: d.services[worker].method[0].ClearField("client_streaming"), "method Session was stream"
    yield "answer", lambda d: setattr(d.services[worker].method[0], "output_type", ".x"), "is stream .tandem.v1.Router"


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, s, id=name) for name, c, s in changes()])
def test_wire_guard_every_breaking_change_is_detected(change: Callable[[Definitions], Any], message: str) -> None:
    new = release.descriptors()
    change(Definitions(new))
    found = breaks(release.descriptors(), new)
    assert found
    assert message in found[0]


def test_wire_guard_removed_definitions_are_detected() -> None:
    new = release.descriptors()
    for file in new.file:
        for repeated in (file.message_type, file.enum_type, file.service):
            del repeated[-1:]
    found = breaks(release.descriptors(), new)
    assert {"message", "enum", "service"} <= {line.split()[2] for line in found if line.endswith("is gone")}


def test_wire_guard_reserved_numbers_and_names_stay_reserved() -> None:
    old = release.descriptors()
    reserve(Definitions(old).messages["tandem.v1.Submit"], 90, "former")
    reserve(Definitions(old).enums["tandem.v1.WorkerRole"], 90, "FORMER", beyond=0)
    assert breaks(old, release.descriptors()) == [
        "tandem.v1.Submit: 90 is reserved no more",
        "tandem.v1.Submit: former is reserved no more",
        "tandem.v1.WorkerRole: 90 is reserved no more",
        "tandem.v1.WorkerRole: FORMER is reserved no more",
    ]
    new = release.descriptors()
    Definitions(new).messages["tandem.v1.Submit"].field.add(name="later", number=90)
    assert "tandem.v1.Submit: 90 was reserved, and is used again" in breaks(old, new)


def test_wire_guard_growth_and_reserved_removal_are_compatible() -> None:
    new = release.descriptors()
    found = Definitions(new)
    found.messages["tandem.v1.Submit"].field.add(name="later", number=90)
    found.enums["tandem.v1.WorkerRole"].value.add(name="WORKER_ROLE_COOK", number=9)
    found.services["tandem.v1.Worker"].method.add(name="Other", input_type=".x", output_type=".y")
    remove(found.messages["tandem.v1.Submit"].field, "attempt")
    reserve(found.messages["tandem.v1.Submit"], 2, "attempt")
    remove(found.enums["tandem.v1.WorkerRole"].value, "WORKER_ROLE_DECODE")
    reserve(found.enums["tandem.v1.WorkerRole"], 2, "WORKER_ROLE_DECODE", beyond=0)
    assert breaks(release.descriptors(), new) == []
