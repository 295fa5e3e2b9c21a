"""Of the hand-off between workers, as the code says it."""

from types import SimpleNamespace
from typing import Any

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol import messages as handoff
from kv_transfer.protocol import wire as handoff_wire
from kv_transfer.session.receiver_link import make_hello, refuses
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.tcp import frames as tcp_frames
from tandem.protocol import wire
from tandem.telemetry.tracing import TraceContext
from tandem.v1 import common_pb2, handoff_pb2
from tandem.values.ids import Incarnation, RequestId, TransferId, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import CachedTokens, PhaseTimes, SampledToken, TokenLogprob
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.sampling import SamplingParams

from .filling import kinds_of
from .sample import NAMES, Sample, facts, without_versions

_KEY = handoff.TransferKey(transfer_id=TransferId("t"), attempt=3)
_HOLDER = PrefixHolder(worker_id=WorkerId("d"), incarnation=Incarnation(3), address="h:1", num_tokens=64)
_SAMPLING = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias={3: 1.5},
    stop_token_ids=(1, 2),
    ignore_eos=True,
    seed=11,
    num_logprobs=2,
    grammar="start: /a/",
    allowed_token_ids=(4, 5),
    bad_words=((6, 7),),
)
_TIMES = PhaseTimes(prefill_queue_s=0.5, prefill_s=1.0, kv_byte_s=4.0, cached=CachedTokens(prefill_pool=16, host=32))
_JOB = handoff.PrefillJob(
    transfer_id=_KEY.transfer_id,
    request_id=RequestId("r"),
    token_ids=tuple(range(40)),
    num_prompt_tokens=40,
    held_tokens=16,
    sampling=_SAMPLING,
    hash_root=NAMES[0],
    choice_index=1,
    priority=-2,
    timeout_s=8.0,
    holder=_HOLDER,
    trace=TraceContext(traceparent=f"00-{1:032x}-{2:016x}-01", tracestate="a=1"),
)
_FETCH = handoff.PrefillJob(
    transfer_id=_KEY.transfer_id,
    request_id=RequestId("r"),
    token_ids=(),
    num_prompt_tokens=0,
    held_tokens=16,
    sampling=SamplingParams(),
    hash_root=NAMES[0],
    fetch=True,
    resume=True,
    names=NAMES,
)
_LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)
_CELLS = CellRange(first_layer=1, num_layers=2, first_unit=3, num_units=4, first_head=0, num_heads=2)
_FAILURE = handoff.Failure.from_error(
    wire.failure_from_pb(common_pb2.Failure(code="Overloaded", message="n", retry_after_s=2))
)
_TOKEN = SampledToken(token_id=5, logprob=-0.5, top_logprobs=(TokenLogprob(token_id=5, logprob=-0.5),))
_BODIES: dict[str, handoff.Body] = {
    "prefill": handoff.Prefill(job=_JOB, lease_s=2.0),
    "fetch": handoff.Prefill(job=_FETCH, lease_s=2.0),
    "offer": handoff.Offer(num_units=3, queue_s=0.5, tail_hash=NAMES[1]),
    "reserve": handoff.Reserve(num_units=3, transport="tcp", grant=b"g"),
    "reject": handoff.Reject(failure=_FAILURE),
    "chunk": handoff.Chunk(seq=2, rewrite=1, cells=_CELLS, checksum=2**63 + 5, write_s=0.25),
    "nack": handoff.Nack(seq=2, rewrite=1),
    "first_token": handoff.FirstToken(token=_TOKEN, cached_tokens=16, cached=CachedTokens(decode_pool=16)),
    "seal": handoff.Seal(num_chunks=3, cached_tokens=4, times=_TIMES, tail_hash=NAMES[2]),
    "commit_ack": handoff.CommitAck(),
    "abort": handoff.Abort(reason="left"),
    "drained": handoff.Drained(),
    "renew": handoff.Renew(transfer_ids=(TransferId("a"), TransferId("b"))),
}


def handoff_samples() -> dict[str, Sample]:
    found = {
        f"handoff/{name}": Sample(write=lambda body=body: _handoff_message(body), read=_read_handoff)
        for name, body in _BODIES.items()
    }
    assert {name.partition("/")[2] for name in found} >= set(kinds_of(handoff_pb2.HandoffMessage.DESCRIPTOR)) - {
        "hello"
    }
    return found | {"handoff/hello": Sample(write=handoff_hello, read=_read_handoff)}


def handoff_hello() -> bytes:
    return _handoff_message(_hello())


def _hello() -> handoff.Hello:
    local: Any = SimpleNamespace(worker_id=WorkerId("d"), layout=_LAYOUT)
    return make_hello(local, [handoff.TransportOffer(name="tcp", advert=b"a", host_id="h")], wire_dtype="int8")


def _handoff_message(body: handoff.Body) -> bytes:
    key = None if isinstance(body, handoff.Hello | handoff.Renew) else _KEY
    envelope = handoff.HandoffEnvelope(incarnation=Incarnation(2**62), addressee=Incarnation(2**61), key=key, body=body)
    return handoff_wire.encode(envelope).SerializeToString(deterministic=True)


def _read_handoff(data: bytes) -> Any:
    envelope = handoff_wire.decode(handoff_pb2.HandoffMessage.FromString(data))
    body = envelope.body
    if isinstance(body, handoff.Hello) and (refusal := refuses(source=_hello(), destination=body)):
        return f"refused: {refusal}"
    return facts(envelope) | {"body": without_versions(facts(body))}


def payload_samples() -> dict[str, Sample]:
    header = tcp_frames.FrameHeader(
        kind=tcp_frames.FrameKind.WRITE, write_id=3, token=bytes(range(16)), cells=_CELLS, payload_bytes=4096
    )
    return {
        "tcp/hello": Sample(
            write=lambda: tcp_frames.pack_header(tcp_frames.hello(bytes(range(16)), 77, 1)),
            read=lambda data: facts(tcp_frames.unpack_header(data)),
        ),
        "tcp/write": Sample(
            write=lambda: tcp_frames.pack_header(header, tcp_frames.seed_of(77, 1)),
            read=lambda data: facts(tcp_frames.unpack_header(data, tcp_frames.seed_of(77, 1))),
        ),
        "tcp/answer": Sample(
            write=lambda: tcp_frames.pack_answer(tcp_frames.FrameKind.DONE, 3),
            read=lambda data: facts(tcp_frames.unpack_answer(data)),
        ),
        "claim/message": Sample(
            write=lambda: one_sided_wire.pack(one_sided_wire.ClaimKind.CLAIM, bytes(range(16))),
            read=lambda data: facts(one_sided_wire.unpack(data)),
        ),
        "claim/grant": Sample(
            write=lambda: one_sided_wire.pack_grant(bytes(range(16)), (3, 1, 2)),
            read=lambda data: facts(one_sided_wire.unpack_grant(data)),
        ),
    }
