"""Errors keep their meaning on every stream."""

import importlib

import pytest

from tandem.errors import AdapterUnavailable, ServingError
from tandem.protocol.wire import NEW_ERRORS, failure_from_pb, failure_to_pb
from tandem.v1 import common_pb2 as pb

importlib.import_module("engine.kv_cache.pool")


def kinds(root: type[ServingError] = ServingError) -> list[type[ServingError]]:
    return [kind for child in root.__subclasses__() for kind in (child, *kinds(child))]


WORKERS_SAY = [kind for kind in kinds() if not kind.__module__.startswith("router.") and kind not in NEW_ERRORS]


@pytest.mark.parametrize("kind", WORKERS_SAY, ids=lambda kind: kind.__name__)
def test_wire_error_round_trips(kind: type[ServingError]) -> None:
    there = failure_from_pb(failure_to_pb(kind("why", retry_after_s=1.5)))
    assert (there.message, there.retry_after_s) == ("why", 1.5)
    assert (there.retryable, there.http_status) == (kind.retryable, kind.http_status)


@pytest.mark.parametrize("kind", sorted(NEW_ERRORS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_wire_new_error_is_sent_as_its_parent(kind: type[ServingError]) -> None:
    assert type(failure_from_pb(pb.Failure(code=kind.__name__, message="why"))) is kind
    assert failure_to_pb(kind("why")).code != kind.__name__


def test_wire_refusal_for_an_adapter_keeps_its_class() -> None:
    """A router treats it otherwise than other refusals: the worker is healthy, and only that adapter is missing."""
    there = failure_from_pb(failure_to_pb(AdapterUnavailable("no files")))
    assert type(there) is AdapterUnavailable
    assert (there.message, there.retry_after_s) == ("no files", None)
