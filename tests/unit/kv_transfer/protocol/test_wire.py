"""Messages survive the wire; any other bytes raise WireError."""

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol import wire
from kv_transfer.protocol.messages import (
    Abort,
    Body,
    Chunk,
    CommitAck,
    Drained,
    Failure,
    FirstToken,
    HandoffEnvelope,
    Hello,
    Nack,
    Offer,
    Prefill,
    Reject,
    Renew,
    Reserve,
    Seal,
    TransferKey,
    TransportOffer,
)
from kv_transfer.protocol.versions import REGIONS, SPOKEN, WINDOWS, spoken_with
from tandem.adapters.files import Adapter
from tandem.errors import AdapterUnavailable, RequestTooLarge
from tandem.protocol.version_negotiation import NoCommonVersion, VersionRange
from tandem.telemetry.tracing import MAX_TEXT_CHARS
from tandem.v1 import common_pb2
from tandem.v1 import handoff_pb2 as pb
from tandem.values.ids import BlockHash, Incarnation, TransferId, WorkerId
from tandem.values.outputs import PhaseTimes, SampledToken, TokenLogprob
from tandem.values.prefix_holder import PrefixHolder
from tests.support.kv_transfer.halves import JOB, LAYOUT
from tests.support.spans import context_of, keeping

KEY = TransferKey(transfer_id=TransferId("t"), attempt=3)
CELLS = CellRange(first_layer=1, num_layers=2, first_unit=3, num_units=4, first_head=0, num_heads=2)
TOKEN = SampledToken(token_id=5, logprob=-0.5, top_logprobs=(TokenLogprob(token_id=5, logprob=-0.5),))
OFFER = TransportOffer(name="tcp", advert=b"x", host_id="h")
HOLDER = PrefixHolder(worker_id=WorkerId("d"), incarnation=Incarnation(3), address="h:1", num_tokens=64)
ADAPTER = Adapter(name="sql", path=Path("/adapters/sql"), digest="ab" * 32, num_bytes=5 << 30)
FETCH = replace(
    JOB,
    token_ids=(),
    num_prompt_tokens=0,
    fetch=True,
    resume=True,
    names=(BlockHash(b"a" * 16), BlockHash(b"b" * 16)),
    held_tokens=16,
)
BODIES = [
    Hello(versions=VersionRange(1, 2), worker_id=WorkerId("w"), layout=LAYOUT, transports=(OFFER,), wire_dtype="int8"),
    Prefill(job=JOB, lease_s=2.0),
    Prefill(job=replace(JOB, holder=HOLDER), lease_s=2.0),
    Prefill(job=replace(JOB, adapter=ADAPTER), lease_s=2.0),
    Prefill(job=replace(JOB, trace=context_of(1, 2, state="a=1")), lease_s=2.0),
    Prefill(job=FETCH, lease_s=2.0),
    Offer(num_units=3, queue_s=0.5, tail_hash=BlockHash(b"h" * 16)),
    Hello(
        versions=spoken_with(4),
        worker_id=WorkerId("w"),
        layout=replace(LAYOUT, tp_size=4, num_regions=4),
        transports=(OFFER,),
        more_regions=((OFFER, OFFER), (), (OFFER,)),
    ),
    Reserve(num_units=3, transport="tcp", grant=b"g"),
    Reserve(num_units=3, transport="tcp", grant=b"g", more_grants=(b"h", b"", b"i")),
    Chunk(seq=2, rewrite=1, cells=CELLS, checksum=5, write_s=0.25, lane=3),
    Reject(failure=Failure(kind=RequestTooLarge, message="no", retry_after_s=None)),
    Reject(failure=Failure(kind=AdapterUnavailable, message="other files", retry_after_s=None)),
    Chunk(seq=2, rewrite=1, cells=CELLS, checksum=2**63 + 5, write_s=0.25),
    Nack(seq=2, rewrite=0),
    FirstToken(token=TOKEN, cached_tokens=16),
    FirstToken(token=SampledToken(token_id=0), cached_tokens=0),
    Seal(num_chunks=3, cached_tokens=4, times=PhaseTimes(prefill_s=1.0), tail_hash=BlockHash(b"h" * 16)),
    Seal(num_chunks=3, cached_tokens=4, times=PhaseTimes(), tail_hash=None),
    CommitAck(),
    Abort(reason="left"),
    Drained(),
    Renew(transfer_ids=(TransferId("a"), TransferId("b"))),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_wire_every_message_round_trips(body: Body) -> None:
    key = None if isinstance(body, Hello | Renew) else KEY
    envelope = HandoffEnvelope(incarnation=Incarnation(2**62), addressee=Incarnation(2**61), key=key, body=body)
    data = wire.encode(envelope).SerializeToString()
    assert wire.decode(pb.HandoffMessage.FromString(data)) == envelope


def test_wire_of_a_worker_of_one_region_is_what_it_was() -> None:
    """A peer of the previous version reads every field."""
    layout = wire.encode(
        HandoffEnvelope(incarnation=Incarnation(1), addressee=Incarnation(0), key=None, body=BODIES[0])
    ).hello.layout
    assert not layout.num_regions
    for body in (
        Reserve(num_units=3, transport="tcp", grant=b"g"),
        Chunk(seq=0, rewrite=0, cells=CELLS, checksum=1, write_s=0),
    ):
        message = wire.encode(HandoffEnvelope(incarnation=Incarnation(1), addressee=Incarnation(2), key=KEY, body=body))
        known = pb.HandoffMessage.FromString(message.SerializeToString())
        assert not known.reserve.more_grants
        assert not known.chunk.lane


def test_worker_of_regions_speaks_no_older_version() -> None:
    """A peer without regions would send everything to the first, or expect it from there."""
    assert spoken_with(1) == SPOKEN
    assert spoken_with(2).oldest == REGIONS > SPOKEN.oldest
    assert spoken_with(2, has_groups=True).oldest == spoken_with(1, has_groups=True).oldest == WINDOWS > REGIONS
    with pytest.raises(NoCommonVersion):
        spoken_with(2).negotiate(VersionRange(2, 3))


def fetch(**changes: object) -> pb.Prefill:
    """A valid message but for the changed fields."""
    fields = {"fetch": True, "names": b"n" * 16, "request_id": "r", "hash_root": bytes(16), "lease_s": 2.0}
    return pb.Prefill(**{**fields, **changes})


@pytest.mark.parametrize(
    "message",
    [
        pb.HandoffMessage(),
        pb.HandoffMessage(transfer_id="t", attempt=1),
        pb.HandoffMessage(transfer_id="t", hello=pb.HandoffHello()),
        pb.HandoffMessage(chunk=pb.Chunk(num_units=1)),
        pb.HandoffMessage(transfer_id="t" * 200, drained=pb.Drained()),
        pb.HandoffMessage(transfer_id="t", chunk=pb.Chunk(seq=2**31, num_units=1, num_layers=1, num_heads=1)),
        pb.HandoffMessage(transfer_id="t", chunk=pb.Chunk(num_units=0, num_layers=1, num_heads=1)),
        pb.HandoffMessage(
            transfer_id="t", chunk=pb.Chunk(num_units=1, num_layers=1, num_heads=1, write_s=float("inf"))
        ),
        pb.HandoffMessage(transfer_id="t", offer=pb.Offer(num_units=2**31)),
        pb.HandoffMessage(transfer_id="t", offer=pb.Offer(num_units=1, queue_s=float("nan"))),
        pb.HandoffMessage(transfer_id="t", seal=pb.Seal(num_chunks=0)),
        pb.HandoffMessage(transfer_id="t", seal=pb.Seal(num_chunks=1, tail_hash=b"short")),
        pb.HandoffMessage(transfer_id="t", reserve=pb.Reserve(num_units=1)),
        pb.HandoffMessage(transfer_id="t", reserve=pb.Reserve(num_units=1, transport="t", more_grants=[b""] * 1024)),
        pb.HandoffMessage(
            transfer_id="t",
            reserve=pb.Reserve(num_units=1, transport="t", more_grants=[bytes(wire.MAX_GRANT_BYTES + 1)]),
        ),
        pb.HandoffMessage(transfer_id="t", chunk=pb.Chunk(num_units=1, num_layers=1, num_heads=1, lane=1024)),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(names=b"")),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(names=b"short")),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(token_ids=[1])),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(held_tokens=16)),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(fetch=False)),
        pb.HandoffMessage(transfer_id="t", prefill=fetch(holder=common_pb2.PrefixHolder(worker_id="w"))),
        pb.HandoffMessage(renew=pb.Renew(transfer_ids=["x"] * 5000)),
    ],
)
def test_wire_value_out_of_bounds_is_refused(message: pb.HandoffMessage) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(message)


@pytest.mark.parametrize("trace", ["", "nonsense", "00-1-2-01", "x" * (MAX_TEXT_CHARS + 1)])
def test_wire_malformed_trace_context_is_ignored(trace: str) -> None:
    message = pb.HandoffMessage(transfer_id="t", prefill=fetch(trace=trace))
    tracer, _ = keeping()
    assert tracer.span("tandem.send", wire.decode(message).body.job.trace) is None


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_wire_random_bytes_raise_only_wire_errors(data: bytes) -> None:
    try:
        message = pb.HandoffMessage.FromString(data)
    except DecodeError:
        return
    try:
        wire.decode(message)
    except wire.WireError:
        return
