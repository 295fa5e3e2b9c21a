"""Routers and workers of two versions speak the older one's; those without a common one refuse each other at once."""

from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from kv_transfer.protocol.messages import Abort, CommitAck, HandoffEnvelope, Hello, TransferKey
from kv_transfer.protocol.versions import KINDS, handoff_dialect
from kv_transfer.protocol.versions import SPOKEN as HANDOFF_SPOKEN
from kv_transfer.session.link import LinkOutbox
from kv_transfer.session.receiver_link import refuses
from router.fleet.session_carriers import GrpcCarrier
from router.fleet.session_wire import ProtocolError, hello_from_pb, hello_to_pb
from router.fleet.worker_session import SessionSettings, WorkerSession
from tandem.protocol.session_versions import ROUTER_KINDS, SPOKEN, WORKER_KINDS
from tandem.protocol.version_negotiation import Dialect, NoCommonVersion, VersionRange
from tandem.protocol.wire import layout_from_pb
from tandem.v1 import handoff_pb2, session_pb2
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation, TransferId, WorkerId
from tests.support.fake_worker import FakeWorker
from tests.unit.worker.test_sessions import Handler
from worker.session_port import SessionPort
from worker.sessions import WorkerSessions

UNSPOKEN = (0, SPOKEN.oldest - 1, SPOKEN.newest + 1)


@pytest.mark.parametrize(
    ("message", "since", "spoken"),
    [
        (session_pb2.RouterMessage, ROUTER_KINDS, SPOKEN),
        (session_pb2.WorkerMessage, WORKER_KINDS, SPOKEN),
        (handoff_pb2.HandoffMessage, KINDS, HANDOFF_SPOKEN),
    ],
)
def test_versions_cover_every_kind_of_message(message: Any, since: Mapping[str, int], spoken: VersionRange) -> None:
    assert {field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields} == since.keys()
    assert max(since.values()) <= spoken.newest
    assert since["hello"] <= spoken.oldest


def test_version_range_common_is_newest_of_both() -> None:
    here = VersionRange(3, 5)
    spoken = {(4, 6): 5, (5, 9): 5, (1, 3): 3, (4, 4): 4, (3, 5): 5, (1, 9): 5}
    for (oldest, newest), version in spoken.items():
        there = VersionRange(oldest, newest)
        assert here.negotiate(there) == there.negotiate(here) == version
    for there in (VersionRange(6, 7), VersionRange(1, 2), VersionRange(0, 0), VersionRange(5, 4)):
        with pytest.raises(NoCommonVersion, match=f"^protocol version {there}, not 3 to 5$"):
            here.negotiate(there)


def test_version_range_from_single_number() -> None:
    assert VersionRange.from_hello(3, 0) == VersionRange(3, 3)
    assert (str(VersionRange(3, 3)), str(VersionRange(3, 4))) == ("3", "3 to 4")


class _Refused(Exception):
    pass


class _Router:
    """A router that speaks another version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> pb.RouterMessage:
        return pb.RouterMessage(hello=pb.RouterHello(protocol_version=self._version, incarnation=7))

    async def abort(self, code: grpc.StatusCode, reason: str) -> None:
        self.refusal = (code, reason)
        raise _Refused

    async def write(self, _message: Any) -> None:
        raise AssertionError("a router that should have been refused got a message")


@pytest.mark.parametrize("version", UNSPOKEN)
async def test_version_range_without_common_is_refused_with_both_ranges(version: int) -> None:
    router = _Router(version)
    with pytest.raises(_Refused):
        await WorkerSessions(Handler()).Session(None, router)
    words = f"protocol version {version}, not {SPOKEN}"
    assert router.refusal == (grpc.StatusCode.FAILED_PRECONDITION, words)
    hello = FakeWorker("d0").hello
    hello.protocol_version, hello.newest_version = version, 0
    with pytest.raises(ProtocolError, match=words):
        hello_from_pb(pb.WorkerMessage(hello=hello))


@pytest.mark.parametrize(
    ("oldest", "newest", "version"),
    [
        (SPOKEN.oldest, 0, SPOKEN.oldest),
        (SPOKEN.oldest - 1, SPOKEN.oldest, SPOKEN.oldest),
        (SPOKEN.newest, SPOKEN.newest + 5, SPOKEN.newest),
        (SPOKEN.oldest, SPOKEN.newest, SPOKEN.newest),
    ],
)
def test_router_session_has_negotiated_version(oldest: int, newest: int, version: int) -> None:
    hello = FakeWorker("d0").hello
    hello.protocol_version, hello.newest_version = oldest, newest
    assert hello_from_pb(pb.WorkerMessage(hello=hello)).protocol_version == version


def test_hello_to_versionless_peer_states_oldest_version() -> None:
    """Such peers compare it with their own for equality."""
    assert hello_to_pb(Incarnation(1)).hello.protocol_version == SPOKEN.oldest
    assert FakeWorker("d0").hello.protocol_version == SPOKEN.oldest


async def test_worker_sends_router_no_newer_kind() -> None:
    port = SessionPort(Incarnation(1), dialect=Dialect(3, WORKER_KINDS | {"cache_offer": 4}))
    port.send(pb.WorkerMessage(cache_offer=pb.CacheOffer()))
    port.send(pb.WorkerMessage(draining=pb.Draining()))
    port.finish()
    sent_kinds = []
    while (message := await port.next()) is not None:
        sent_kinds.append(message.WhichOneof("kind"))
    assert sent_kinds == ["draining"]


async def test_router_sends_worker_no_newer_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTER_KINDS, "resync", SPOKEN.newest)
    hello = FakeWorker("d0").hello
    for newest, expected in ((0, ["cache_offer_ended"]), (SPOKEN.newest, ["resync", "cache_offer_ended"])):
        hello.newest_version = newest
        info = hello_from_pb(pb.WorkerMessage(hello=hello))
        session = WorkerSession(GrpcCarrier(None), info, SessionSettings(metadata=(), incarnation=Incarnation(1)))
        session.resync()
        session.end_migration()
        assert [message.WhichOneof("kind") for message in session._outgoing] == expected


def _hello(versions: VersionRange) -> Hello:
    layout = layout_from_pb(FakeWorker("d0").hello.layout)
    return Hello(versions=versions, worker_id=WorkerId("d0"), layout=layout, transports=())


def test_workers_without_common_version_are_not_paired() -> None:
    here = _hello(HANDOFF_SPOKEN)
    assert refuses(source=here, destination=_hello(VersionRange(HANDOFF_SPOKEN.oldest, HANDOFF_SPOKEN.oldest))) is None
    newer = VersionRange(HANDOFF_SPOKEN.newest + 1, HANDOFF_SPOKEN.newest + 2)
    reason = refuses(source=here, destination=_hello(newer))
    assert reason == f"protocol_version: {HANDOFF_SPOKEN} at the source, {newer} at the destination"


async def test_handoff_sends_peer_no_newer_kind() -> None:
    outbox = LinkOutbox()
    assert outbox.dialect == handoff_dialect(HANDOFF_SPOKEN.newest)
    outbox.dialect = Dialect(2, KINDS | {"commit_ack": 3})
    key = TransferKey(transfer_id=TransferId("x"), attempt=1)
    for body in (CommitAck(), Abort(reason="no")):
        outbox.enqueue(HandoffEnvelope(incarnation=Incarnation(1), addressee=Incarnation(2), key=key, body=body))
    outbox.close()
    sent = []
    while (envelope := await outbox.get()) is not None:
        sent.append(envelope.body)
    assert sent == [Abort(reason="no")]
