"""Converts hand-off messages to protobuf and back. Input from a peer decodes to a value within bounds, or raises
WireError."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.layout.cell_range import CellRange
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
    PrefillJob,
    Reject,
    Renew,
    Reserve,
    Seal,
    TransferKey,
    TransportOffer,
)
from tandem.protocol import wire
from tandem.protocol.version_negotiation import VersionRange
from tandem.telemetry.tracing import context_from_text
from tandem.v1 import common_pb2
from tandem.v1 import handoff_pb2 as pb
from tandem.values.block_hash import HASH_BLOCK_TOKENS, HASH_BYTES
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.prefix_holder import PrefixHolder, holder_from_pb, holder_to_pb
from tandem.values.sampling import MAX_TOP_LOGPROBS

MAX_ID_CHARS = 128
MAX_TOKENS = 1 << 22
MAX_UNITS = 1 << 22
MAX_CHUNKS = 1 << 24
MAX_GRANT_BYTES = 8 << 20
MAX_TRANSPORTS = 8
MAX_LANES = 256
MAX_RENEWALS = 4096
MAX_TEXT_CHARS = 4096
MIN_LEASE_S, MAX_LEASE_S = 0.001, 3600.0
MAX_WRITE_S = 3600.0
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_BLOCK_SIZE = 4096


class WireError(Exception):
    """A message is malformed or out of bounds; `key` names the attempt at fault, where it could be read."""

    def __init__(self, message: str, key: TransferKey | None = None) -> None:
        super().__init__(message)
        self.key = key


def kind_of(body: Body) -> str:
    """The message's field name in HandoffMessage."""
    return _ENCODERS[type(body)][0]


def encode(envelope: HandoffEnvelope) -> pb.HandoffMessage:
    """A message for the wire."""
    message = pb.HandoffMessage(incarnation=envelope.incarnation, addressee=envelope.addressee)
    if envelope.key is not None:
        message.transfer_id, message.attempt = envelope.key.transfer_id, envelope.key.attempt
    field, encoder = _ENCODERS[type(envelope.body)]
    value = encoder(envelope.body)
    # An empty message (DRAINED, COMMIT_ACK) must still select its field of the oneof.
    getattr(message, field).SetInParent()
    getattr(message, field).CopyFrom(value)
    return message


def decode(message: pb.HandoffMessage) -> HandoffEnvelope:
    """A message from the wire. Raises WireError."""
    kind = message.WhichOneof("kind")
    key = _key(message) if message.transfer_id else None
    if kind is None:
        raise WireError("unknown kind of message", key)
    if (kind in ("hello", "renew")) != (key is None) and kind != "reject":
        raise WireError(f"{kind} with a transfer_id, or another kind without", key)
    try:
        body = _DECODERS[kind](getattr(message, kind), key)
    except WireError as error:
        raise WireError(f"{kind}: {error}", key) from None
    return HandoffEnvelope(
        incarnation=Incarnation(message.incarnation), addressee=Incarnation(message.addressee), key=key, body=body
    )


def _key(message: pb.HandoffMessage) -> TransferKey:
    _check("transfer_id length", len(message.transfer_id), 1, MAX_ID_CHARS)
    return TransferKey(transfer_id=TransferId(message.transfer_id), attempt=message.attempt)


def _encode_hello(body: Hello) -> pb.HandoffHello:
    return pb.HandoffHello(
        protocol_version=body.versions.oldest,
        newest_version=body.versions.newest,
        worker_id=body.worker_id,
        layout=wire.layout_to_pb(body.layout),
        transports=encode_offers(body.transports),
        wire_dtype=body.wire_dtype,
        more_regions=[pb.RegionTransports(transports=encode_offers(offers)) for offers in body.more_regions],
    )


def encode_offers(offers: Sequence[TransportOffer]) -> list[pb.TransportOffer]:
    """The ends of one region for the wire."""
    return [pb.TransportOffer(name=o.name, advert=o.advert, host_id=o.host_id) for o in offers]


def _encode_prefill(body: Prefill) -> pb.Prefill:
    job = body.job
    message = pb.Prefill(
        token_ids=job.token_ids,
        num_prompt_tokens=job.num_prompt_tokens,
        held_tokens=job.held_tokens,
        choice_index=job.choice_index,
        hash_root=job.hash_root,
        priority=job.priority,
        timeout_s=job.timeout_s,
        request_id=job.request_id,
        lease_s=body.lease_s,
        resume=job.resume,
        fetch=job.fetch,
        names=b"".join(job.names),
        holder=holder_to_pb(job.holder),
        trace=job.trace.to_text() if job.trace is not None else None,
        adapter=wire.adapter_to_pb(job.adapter) if job.adapter is not None else None,
    )
    wire.fill_sampling(message.sampling, job.sampling)
    return message


def _encode_chunk(body: Chunk) -> pb.Chunk:
    cells = body.cells
    return pb.Chunk(
        seq=body.seq,
        first_layer=cells.first_layer,
        num_layers=cells.num_layers,
        first_unit=cells.first_unit,
        num_units=cells.num_units,
        first_head=cells.first_head,
        num_heads=cells.num_heads,
        checksum=body.checksum,
        rewrite=body.rewrite,
        write_s=body.write_s,
        lane=body.lane,
    )


def _encode_reserve(body: Reserve) -> pb.Reserve:
    return pb.Reserve(
        num_units=body.num_units, transport=body.transport, grant=body.grant, more_grants=body.more_grants
    )


def _encode_first_token(body: FirstToken) -> pb.FirstToken:
    logprobs = wire.logprobs_to_pb(body.token)
    return pb.FirstToken(
        token_id=body.token.token_id,
        logprobs=logprobs,
        cached_tokens=body.cached_tokens,
        cached_by_source=wire.cached_to_pb(body.cached),
    )


def _encode_seal(body: Seal) -> pb.Seal:
    times = wire.times_to_pb(body.times)
    return pb.Seal(num_chunks=body.num_chunks, cached_tokens=body.cached_tokens, times=times, tail_hash=body.tail_hash)


def _decode_hello(message: pb.HandoffHello, _key: TransferKey | None) -> Hello:
    _check("worker_id length", len(message.worker_id), 1, MAX_ID_CHARS)
    _check("more_regions", len(message.more_regions), 0, MAX_LANES - 1)
    _check("wire_dtype length", len(message.wire_dtype), 0, MAX_ID_CHARS)
    _check_layout(message.layout)
    return Hello(
        versions=VersionRange.from_hello(message.protocol_version, message.newest_version),
        worker_id=WorkerId(message.worker_id),
        layout=wire.layout_from_pb(message.layout),
        # A sender of several lanes names one for each.
        transports=decode_offers(message.transports, MAX_LANES),
        wire_dtype=message.wire_dtype,
        more_regions=tuple(decode_offers(region.transports) for region in message.more_regions),
    )


def decode_offers(offers: Sequence[pb.TransportOffer], most: int = MAX_TRANSPORTS) -> tuple[TransportOffer, ...]:
    """The ends of one region, at most so many. Raises WireError."""
    _check("transports", len(offers), 0, most)
    for offer in offers:
        _check("transport name length", len(offer.name), 1, MAX_ID_CHARS)
        _check("host_id length", len(offer.host_id), 0, MAX_TEXT_CHARS)
        _check("advert bytes", len(offer.advert), 0, MAX_TEXT_CHARS)
    return tuple(TransportOffer(name=o.name, advert=o.advert, host_id=o.host_id) for o in offers)


def _check_layout(layout: common_pb2.KVLayout) -> None:
    _check("layout.num_layers", layout.num_layers, 1, MAX_LAYERS)
    _check("layout.num_kv_heads", layout.num_kv_heads, 1, MAX_HEADS)
    _check("layout.head_dim", layout.head_dim, 1, MAX_HEADS)
    _check("layout.block_size", layout.block_size, 1, MAX_BLOCK_SIZE)
    _check("layout.tp_size", layout.tp_size, 1, MAX_HEADS)
    _check("layout.tp_rank", layout.tp_rank, 0, layout.tp_size - 1)
    _check("layout.num_regions", layout.num_regions, 0, MAX_LANES)
    _check_windows(layout)
    _check("layout.model_fingerprint length", len(layout.model_fingerprint), 0, MAX_TEXT_CHARS)
    _check("layout.dtype length", len(layout.dtype), 1, MAX_ID_CHARS)


def _check_windows(layout: common_pb2.KVLayout) -> None:
    layers = list(layout.windowed_layers)
    _check("layout.windowed_layers", len(layers), 0, layout.num_layers - 1)
    _check("layout.window", layout.window, 1 if layers else 0, MAX_TOKENS if layers else 0)
    if layers:
        _check("layout.windowed_layers", layers[-1], 0, layout.num_layers - 1)
    if sorted(set(layers)) != layers:
        raise WireError("layout.windowed_layers are not ascending")


def _decode_prefill(message: pb.Prefill, key: TransferKey | None) -> Prefill:
    if key is None:
        raise WireError("no transfer_id")
    names = _names(message)
    if message.fetch:
        _check("tokens", len(message.token_ids), 0, 0)
        _check("held_tokens", message.held_tokens, 0, len(names) * HASH_BLOCK_TOKENS - 1)
    else:
        _check("tokens", len(message.token_ids), 1, MAX_TOKENS)
        _check("num_prompt_tokens", message.num_prompt_tokens, 1, len(message.token_ids))
        _check("held_tokens", message.held_tokens, 0, len(message.token_ids) - 1)
    _check("request_id length", len(message.request_id), 1, MAX_ID_CHARS)
    _check("hash_root bytes", len(message.hash_root), HASH_BYTES, HASH_BYTES)
    _check("lease_s", message.lease_s, MIN_LEASE_S, MAX_LEASE_S)
    timeout_s = message.timeout_s if message.HasField("timeout_s") else None
    if timeout_s is not None:
        _check("timeout_s", timeout_s, 0.0, math.inf)
    job = PrefillJob(
        transfer_id=key.transfer_id,
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        held_tokens=message.held_tokens,
        sampling=wire.sampling_from_pb(message.sampling),
        hash_root=BlockHash(message.hash_root),
        choice_index=message.choice_index,
        priority=message.priority,
        timeout_s=timeout_s,
        resume=message.resume,
        fetch=message.fetch,
        names=names,
        holder=_holder(message),
        # A malformed or oversized trace context is dropped: it is never a reason to refuse work.
        trace=context_from_text(message.trace) if message.HasField("trace") else None,
        adapter=wire.adapter_from_pb(message.adapter) if message.HasField("adapter") else None,
    )
    return Prefill(job=job, lease_s=message.lease_s)


def _names(message: pb.Prefill) -> tuple[BlockHash, ...]:
    count, rest = divmod(len(message.names), HASH_BYTES)
    _check("names bytes beyond whole names", rest, 0, 0)
    most = MAX_TOKENS // HASH_BLOCK_TOKENS if message.fetch else 0
    _check("names", count, 1 if message.fetch else 0, most)
    return tuple(BlockHash(message.names[i * HASH_BYTES : (i + 1) * HASH_BYTES]) for i in range(count))


def _holder(message: pb.Prefill) -> PrefixHolder | None:
    if not message.HasField("holder"):
        return None
    holder = message.holder
    _check("holder.worker_id length", len(holder.worker_id), 1, MAX_ID_CHARS)
    _check("holder.address length", len(holder.address), 1, MAX_TEXT_CHARS)
    _check("holder.num_tokens", holder.num_tokens, 0, MAX_TOKENS)
    return holder_from_pb(holder)


def _decode_offer(message: pb.Offer, _key: TransferKey | None) -> Offer:
    _check("num_units", message.num_units, 1, MAX_UNITS)
    _check("queue_s", message.queue_s, 0.0, math.inf)
    return Offer(num_units=message.num_units, queue_s=message.queue_s, tail_hash=_tail_hash(message))


def _decode_reserve(message: pb.Reserve, _key: TransferKey | None) -> Reserve:
    _check("num_units", message.num_units, 1, MAX_UNITS)
    _check("grant bytes", len(message.grant), 0, MAX_GRANT_BYTES)
    _check("transport name length", len(message.transport), 1, MAX_ID_CHARS)
    _check("more_grants", len(message.more_grants), 0, MAX_LANES - 1)
    for grant in message.more_grants:
        _check("grant bytes", len(grant), 0, MAX_GRANT_BYTES)
    return Reserve(
        num_units=message.num_units,
        transport=message.transport,
        grant=message.grant,
        more_grants=tuple(message.more_grants),
    )


def _decode_reject(message: pb.Reject, _key: TransferKey | None) -> Reject:
    _check("message length", len(message.failure.message), 0, MAX_TEXT_CHARS)
    return Reject(failure=Failure.from_error(wire.failure_from_pb(message.failure)))


def _decode_chunk(message: pb.Chunk, _key: TransferKey | None) -> Chunk:
    # Only the receiver knows the reservation, so it checks that the cells lie within.
    _check("seq", message.seq, 0, MAX_CHUNKS - 1)
    _check("num_units", message.num_units, 1, MAX_UNITS)
    _check("num_layers", message.num_layers, 1, MAX_LAYERS)
    _check("num_heads", message.num_heads, 1, MAX_HEADS)
    _check("write_s", message.write_s, 0.0, MAX_WRITE_S)
    _check("lane", message.lane, 0, MAX_LANES - 1)
    cells = CellRange(
        first_layer=message.first_layer,
        num_layers=message.num_layers,
        first_unit=message.first_unit,
        num_units=message.num_units,
        first_head=message.first_head,
        num_heads=message.num_heads,
    )
    return Chunk(
        seq=message.seq,
        rewrite=message.rewrite,
        cells=cells,
        checksum=message.checksum,
        write_s=message.write_s,
        lane=message.lane,
    )


def _decode_nack(message: pb.Nack, _key: TransferKey | None) -> Nack:
    _check("seq", message.seq, 0, MAX_CHUNKS - 1)
    return Nack(seq=message.seq, rewrite=message.rewrite)


def _decode_first_token(message: pb.FirstToken, _key: TransferKey | None) -> FirstToken:
    _check("cached_tokens", message.cached_tokens, 0, MAX_TOKENS)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    if logprobs is not None:
        _check("logprobs", len(logprobs.top), 0, MAX_TOP_LOGPROBS)
    return FirstToken(
        token=wire.token_from_pb(message.token_id, logprobs),
        cached_tokens=message.cached_tokens,
        cached=wire.cached_from_pb(message.cached_by_source),
    )


def _decode_seal(message: pb.Seal, _key: TransferKey | None) -> Seal:
    _check("num_chunks", message.num_chunks, 1, MAX_CHUNKS)
    _check("cached_tokens", message.cached_tokens, 0, MAX_TOKENS)
    return Seal(
        num_chunks=message.num_chunks,
        cached_tokens=message.cached_tokens,
        times=wire.times_from_pb(message.times),
        tail_hash=_tail_hash(message),
    )


def _tail_hash(message: pb.Offer | pb.Seal) -> BlockHash | None:
    if not message.HasField("tail_hash"):
        return None
    _check("tail_hash bytes", len(message.tail_hash), HASH_BYTES, HASH_BYTES)
    return BlockHash(message.tail_hash)


def _decode_abort(message: pb.Abort, _key: TransferKey | None) -> Abort:
    _check("reason length", len(message.reason), 0, MAX_TEXT_CHARS)
    return Abort(reason=message.reason)


def _decode_renew(message: pb.Renew, _key: TransferKey | None) -> Renew:
    _check("renewals", len(message.transfer_ids), 0, MAX_RENEWALS)
    return Renew(transfer_ids=tuple(TransferId(t) for t in message.transfer_ids))


def _check(name: str, value: float, low: float, high: float) -> None:
    # This form of the comparison rejects NaN.
    if not low <= value <= high:
        raise WireError(f"{name} {value} is not in [{low}, {high}]")


_DECODERS: dict[str, Callable[[Any, TransferKey | None], Body]] = {
    "hello": _decode_hello,
    "prefill": _decode_prefill,
    "offer": _decode_offer,
    "reserve": _decode_reserve,
    "reject": _decode_reject,
    "chunk": _decode_chunk,
    "nack": _decode_nack,
    "first_token": _decode_first_token,
    "seal": _decode_seal,
    "commit_ack": lambda _message, _key: CommitAck(),
    "abort": _decode_abort,
    "drained": lambda _message, _key: Drained(),
    "renew": _decode_renew,
}

_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    Hello: ("hello", _encode_hello),
    Prefill: ("prefill", _encode_prefill),
    Offer: (
        "offer",
        lambda body: pb.Offer(num_units=body.num_units, queue_s=body.queue_s, tail_hash=body.tail_hash),
    ),
    Reserve: ("reserve", _encode_reserve),
    Reject: ("reject", lambda body: pb.Reject(failure=wire.failure_to_pb(body.failure.to_error()))),
    Chunk: ("chunk", _encode_chunk),
    Nack: ("nack", lambda body: pb.Nack(seq=body.seq, rewrite=body.rewrite)),
    FirstToken: ("first_token", _encode_first_token),
    Seal: ("seal", _encode_seal),
    CommitAck: ("commit_ack", lambda _body: pb.CommitAck()),
    Abort: ("abort", lambda body: pb.Abort(reason=body.reason[:MAX_TEXT_CHARS])),
    Drained: ("drained", lambda _body: pb.Drained()),
    Renew: ("renew", lambda body: pb.Renew(transfer_ids=body.transfer_ids)),
}
