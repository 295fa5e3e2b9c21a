"""Routers and workers of different versions refuse each other at once; a new kind of message is a new version."""

from typing import Any

import grpc
import pytest

from router.session_wire import ProtocolError, hello_from_pb
from tandem.session_port import PROTOCOL_VERSION
from tandem.v1 import session_pb2 as pb
from tandem.worker_session import WorkerSessions
from tests.fake_worker import FakeWorker
from tests.unit.test_worker_session import Handler

KINDS = {
    2: (
        {"hello", "submit", "cancel", "reroute", "inherit", "settled", "adopt", "resync", "orders"},
        {"hello", "tokens", "refused", "transfer_failed", "kv_events", "load", "draining", "bequest", "inherited"},
    ),
    3: ({"supersede", "read", "pin", "unpin"}, {"read", "pin_told"}),
}
"""What each version added: of routers, of workers. Whoever adds another raises the version and says so here."""


def test_every_kind_of_message_belongs_to_a_version() -> None:
    assert max(KINDS) == PROTOCOL_VERSION
    for side, message in enumerate((pb.RouterMessage, pb.WorkerMessage)):
        kinds = {field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields}
        assert set().union(*(added[side] for added in KINDS.values())) == kinds


class _Refused(Exception):
    pass


class _Router:
    """Of another version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> pb.RouterMessage:
        return pb.RouterMessage(hello=pb.RouterHello(protocol_version=self._version, incarnation=7))

    async def abort(self, code: grpc.StatusCode, reason: str) -> None:
        self.refusal = (code, reason)
        raise _Refused

    async def write(self, _message: Any) -> None:
        raise AssertionError("something was told to a router that should have been refused")


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_another_version_is_refused_by_both_sides(version: int) -> None:
    router = _Router(version)
    with pytest.raises(_Refused):
        await WorkerSessions(Handler()).Session(None, router)
    words = f"protocol version {version}, not {PROTOCOL_VERSION}"
    assert router.refusal == (grpc.StatusCode.FAILED_PRECONDITION, words)
    hello = FakeWorker("d0").hello
    hello.protocol_version = version
    with pytest.raises(ProtocolError, match=words):
        hello_from_pb(pb.WorkerMessage(hello=hello))
