"""Messages are compatible with the previous version in both directions, new fields aside."""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.config.cluster import ClusterConfig
from tandem.protocol import wire
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tandem.v1 import common_pb2 as pb
from tandem.v1 import session_pb2
from tests.previous import release
from tests.previous.release import Release, known
from tests.previous.samples import collection as samples


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    return Release(tmp_path_factory.mktemp("previous"))


def lacking(here: Any, there: Any, place: str = "") -> list[str]:
    """Where something of `there` is missing or different `here`, which may have more fields."""
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            fault
            for name, value in there.items()
            for fault in (lacking(here[name], value, f"{place}.{name}") if name in here else [f"{place}.{name}"])
        ]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        return [
            fault for i, pair in enumerate(zip(here, there, strict=True)) for fault in lacking(*pair, f"{place}[{i}]")
        ]
    return [] if here == there else [f"{place}: {here!r}, not {there!r}"]


def test_lacking_finds_missing_and_different_values() -> None:
    assert lacking({"a": [{"b": 1}], "new": 2}, {"a": [{"b": 1}]}) == []
    assert lacking({"a": [{"b": 1}]}, {"a": [{"b": 2, "c": 3}]}) == [".a[0].b: 1, not 2", ".a[0].c"]
    assert lacking({}, {"a": 1}) == [".a"]
    assert lacking([1], [1, 2]) == [": [1], not [1, 2]"]


def test_samples_cover_every_message_and_are_readable() -> None:
    messages = samples.written()
    assert release.samples().keys() <= messages.keys(), "what was said may still be said, by others"
    read = samples.read(messages) | {f"{name}, kept": value for name, value in release.samples_read().items()}
    assert [name for name, value in read.items() if str(value).startswith(("cannot be read", "refused"))] == []


def test_samples_of_previous_version_are_read_equally() -> None:
    assert lacking(samples.read(release.samples()), release.samples_read()) == []


def test_previous_version_reads_samples_with_unknown_fields(previous: Release) -> None:
    messages = {name: data for name, data in samples.written().items() if name in release.samples()}
    newer = {name: samples.with_news(name, data) for name, data in messages.items()}
    assert sum(newer[name] != data for name, data in messages.items()) > 60
    here = samples.read(messages)
    assert lacking(here, previous.says_of(newer)) == []


def test_error_codes_are_known_to_previous_version() -> None:
    """New codes go to `NEW_ERRORS` until the previous version knows them (ADR 14)."""
    known_there = {name.removeprefix("error/") for name in release.samples() if name.startswith("error/")}
    assert len(known_there) > 10
    sent = {wire.failure_to_pb(wire.failure_from_pb(pb.Failure(code=name))).code for name in wire._ERRORS}
    of_new_orders = {kind.__name__ for kind in wire.ERRORS_OF_NEW_ORDERS}
    assert sent - of_new_orders <= known_there
    assert ({kind.__name__ for kind in wire.NEW_ERRORS} | of_new_orders).isdisjoint(known_there)


def test_previous_version_gives_no_orders_with_adapters() -> None:
    """Therefore `ERRORS_OF_NEW_ORDERS` never reach it."""
    said = release.samples()
    router = session_pb2.RouterMessage.FromString(said["router/hello"]).hello
    worker = session_pb2.WorkerMessage.FromString(said["worker/hello"]).hello
    for hello in (router, worker):
        assert max(hello.protocol_version, hello.newest_version) < ADAPTERS_SINCE


def test_samples_with_unknown_fields_are_read_equally() -> None:
    messages = samples.written()
    newer = {name: samples.with_news(name, data) for name, data in messages.items()}
    assert samples.read(newer) == samples.read(messages)


def test_samples_pinned_as_same_are_unchanged() -> None:
    messages = samples.written()
    kept = {name: data for name, data in release.samples().items() if name.startswith("same/")}
    assert len(kept) >= 4
    assert {name: messages[name] for name in kept} == kept


def test_settings_of_previous_version_are_valid(previous: Release) -> None:
    """Its supervisor writes all of them for processes that may be of this version."""
    ClusterConfig.model_validate(previous.defaults())


def test_known_drops_settings_unknown_to_previous_version() -> None:
    defaults = {"a": 1, "section": {"b": 2, "open": {}}}
    config = {"a": 3, "new": 4, "section": {"b": 5, "new": 6, "open": {"x": {"y": 7}}}}
    assert known(config, defaults) == {"a": 3, "section": {"b": 5, "open": {"x": {"y": 7}}}}
