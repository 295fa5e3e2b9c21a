"""Converts values that several services share to and from protobuf."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.adapters.files import Adapter
from tandem.errors import (
    AdapterUnavailable,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    RequestTooLarge,
    RouteNotFound,
    ServingError,
    StreamTaken,
    TransferError,
    Unauthenticated,
    Unavailable,
)
from tandem.v1 import common_pb2 as pb
from tandem.v1 import session_pb2
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, FinishReason, PhaseTimes, SampledToken, TokenLogprob
from tandem.values.pooling import PoolingMode
from tandem.values.sampling import SamplingParams

_OPTIONAL_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
    "num_logprobs",
    "grammar",
)
_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.DEADLINE: pb.FINISH_REASON_ERROR,  # before ERROR, which the number decodes to
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_TO_PB.items()}
# By class name, so that the error a client gets does not depend on the process that detected it.
_ERRORS: dict[str, type[ServingError]] = {
    kind.__name__: kind
    for kind in (
        AdapterUnavailable,
        Cancelled,
        ContextLengthExceeded,
        DeadlineExceeded,
        InternalError,
        InvalidRequest,
        ModelNotFound,
        NotAllowed,
        Overloaded,
        RequestTooLarge,
        RouteNotFound,
        StreamTaken,
        TransferError,
        Unauthenticated,
        Unavailable,
    )
}
NEW_ERRORS: frozenset[type[ServingError]] = frozenset({NotAllowed})
"""Errors that the previous version does not know: they are sent as the base class that it knows (ADR 14)."""
ERRORS_OF_NEW_ORDERS: frozenset[type[ServingError]] = frozenset({AdapterUnavailable})
"""Errors that the previous version does not know either, and are sent nevertheless: only an order that it cannot give
(one with an adapter) causes them."""
_SENT_ERRORS = _ERRORS.keys() - {kind.__name__ for kind in NEW_ERRORS}


def token_ids_to_bytes(token_ids: "array[int]") -> bytes:
    """Pack an array of type "i" as `Submit.prompt`: four bytes per token, least significant first."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids.tobytes()


def prompt_from_pb(submit: session_pb2.Submit) -> "array[int]":
    """The prompt of an order, as routers of any version send it. Raises InvalidRequest."""
    if not submit.prompt:
        try:
            return array("i", submit.prompt_token_ids)
        except OverflowError:
            raise InvalidRequest("prompt_token_ids must be below 2^31", param="prompt_token_ids") from None
    return _token_ids_from_bytes(submit.prompt, "prompt")


def prediction_from_pb(submit: session_pb2.Submit) -> "array[int] | None":
    """The expected answer of an order, if it has one. Raises InvalidRequest."""
    return _token_ids_from_bytes(submit.prediction, "prediction") if submit.prediction else None


def _token_ids_from_bytes(packed: bytes, param: str) -> "array[int]":
    token_ids = array("i")
    if len(packed) % token_ids.itemsize:
        raise InvalidRequest(f"{param} has {len(packed)} bytes, not four for each token", param=param)
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def fill_sampling(message: pb.SamplingParams, params: SamplingParams) -> None:
    """Encode with all numbers set, so that the receiver's defaults do not matter.

    Into a part of a message: making the part first would copy it.
    """
    message.max_tokens = params.max_tokens
    message.min_tokens = params.min_tokens
    message.temperature = params.temperature
    message.top_k = params.top_k
    message.top_p = params.top_p
    message.min_p = params.min_p
    message.presence_penalty = params.presence_penalty
    message.frequency_penalty = params.frequency_penalty
    message.repetition_penalty = params.repetition_penalty
    message.ignore_eos = params.ignore_eos
    message.seed = params.seed
    # Hardly any request has these.
    if params.num_logprobs is not None:
        message.num_logprobs = params.num_logprobs
    if params.grammar is not None:
        message.grammar = params.grammar
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    if params.stop_token_ids:
        message.stop_token_ids.extend(params.stop_token_ids)
    if params.allowed_token_ids:
        message.allowed_token_ids.extend(params.allowed_token_ids)
    for word in params.bad_words:
        message.bad_words.add(token_ids=word)


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Decode; absent fields take the neutral value, and bounds are not checked here (see SamplingParams.validate)."""
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return SamplingParams(
        **given,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
    )


def finish_reason_to_pb(reason: FinishReason) -> pb.FinishReason:
    """Enum to its wire number."""
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(number: int) -> FinishReason:
    """Decode a reason; an unknown number, of a newer peer, counts as an error rather than as a normal end."""
    return _FINISH_FROM_PB.get(number, FinishReason.ERROR)


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    """KV geometry for a HELLO."""
    return pb.KVLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        tp_rank=layout.tp_rank,
        # Left out where it is 1, as peers of earlier versions do.
        num_regions=0 if layout.num_regions == 1 else layout.num_regions,
        windowed_layers=layout.windowed_layers,
        window=layout.window,
    )


def layout_from_pb(message: pb.KVLayout) -> KVLayout:
    """KV geometry of a peer; compare with `KVLayout.mismatch` before using it."""
    return KVLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        tp_size=message.tp_size,
        tp_rank=message.tp_rank,
        num_regions=message.num_regions or 1,
        windowed_layers=tuple(message.windowed_layers),
        window=message.window,
    )


def adapter_to_pb(adapter: Adapter) -> pb.Adapter:
    """An adapter for an order."""
    return pb.Adapter(name=adapter.name, path=str(adapter.path), digest=adapter.digest, num_bytes=adapter.num_bytes)


def adapter_from_pb(message: pb.Adapter) -> Adapter:
    """The adapter of an order."""
    return Adapter(name=message.name, path=Path(message.path), digest=message.digest, num_bytes=message.num_bytes)


def times_to_pb(times: PhaseTimes) -> pb.PhaseTimes:
    """Phase seconds to the wire."""
    return pb.PhaseTimes(
        prefill_queue_s=times.prefill_queue_s,
        prefill_s=times.prefill_s,
        transfer_s=times.transfer_s,
        decode_queue_s=times.decode_queue_s,
        decode_s=times.decode_s,
        router_queue_s=times.router_queue_s,
        kv_byte_s=times.kv_byte_s,
        cached=None if times.cached == NO_CACHED_TOKENS else cached_to_pb(times.cached),
    )


def times_from_pb(message: pb.PhaseTimes) -> PhaseTimes:
    """Phase seconds from the wire."""
    return PhaseTimes(
        prefill_queue_s=message.prefill_queue_s,
        prefill_s=message.prefill_s,
        transfer_s=message.transfer_s,
        decode_queue_s=message.decode_queue_s,
        decode_s=message.decode_s,
        router_queue_s=message.router_queue_s,
        kv_byte_s=message.kv_byte_s,
        cached=cached_from_pb(message.cached) if message.HasField("cached") else NO_CACHED_TOKENS,
    )


def cached_to_pb(cached: CachedTokens) -> pb.CachedTokens:
    """Cached tokens by source to the wire."""
    return pb.CachedTokens(
        prefill_pool=cached.prefill_pool,
        decode_pool=cached.decode_pool,
        fetched=cached.fetched,
        host=cached.host,
        disk=cached.disk,
    )


def cached_from_pb(message: pb.CachedTokens) -> CachedTokens:
    """Cached tokens by source from the wire."""
    return CachedTokens(
        prefill_pool=message.prefill_pool,
        decode_pool=message.decode_pool,
        fetched=message.fetched,
        host=message.host,
        disk=message.disk,
    )


def logprobs_to_pb(token: SampledToken) -> pb.Logprobs | None:
    """Convert logprobs; None when the request wants none."""
    if token.logprob is None:
        return None
    top = [pb.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in token.top_logprobs]
    return pb.Logprobs(logprob=token.logprob, top=top)


def token_from_pb(token_id: int, logprobs: pb.Logprobs | None) -> SampledToken:
    """One sampled token with its optional logprobs."""
    if logprobs is None:
        return SampledToken(token_id=token_id)
    top = tuple(TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in logprobs.top)
    return SampledToken(token_id=token_id, logprob=logprobs.logprob, top_logprobs=top)


def failure_to_pb(error: ServingError) -> pb.Failure:
    """Encode an error as a value on a stream; one that the reader may not know is sent as a base class of it."""
    code = next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _SENT_ERRORS), InternalError.__name__
    )
    return pb.Failure(code=code, message=error.message, retry_after_s=error.retry_after_s)


def failure_from_pb(message: pb.Failure) -> ServingError:
    """Decode an error; an unknown class becomes InternalError."""
    kind = _ERRORS.get(message.code, InternalError)
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    return kind(message.message, retry_after_s=retry_after_s)


_POOLING_TO_PB = {
    PoolingMode.CLS: session_pb2.POOLING_MODE_CLS,
    PoolingMode.MAX: session_pb2.POOLING_MODE_MAX,
    PoolingMode.MEAN: session_pb2.POOLING_MODE_MEAN,
    PoolingMode.MEAN_SQRT_LEN: session_pb2.POOLING_MODE_MEAN_SQRT_LEN,
    PoolingMode.WEIGHTED_MEAN: session_pb2.POOLING_MODE_WEIGHTED_MEAN,
    PoolingMode.LAST: session_pb2.POOLING_MODE_LAST,
}
_POOLING_FROM_PB: dict[int, PoolingMode] = {number: mode for mode, number in _POOLING_TO_PB.items()}


def pooling_to_pb(modes: Iterable[PoolingMode]) -> "list[session_pb2.PoolingMode]":
    """Encode ways of pooling."""
    return [_POOLING_TO_PB[mode] for mode in modes]


def pooling_from_pb(numbers: "Sequence[session_pb2.PoolingMode]") -> tuple[PoolingMode, ...]:
    """Decode ways of pooling; none: the mean. Raises InvalidRequest for unknown or repeated ones."""
    modes = tuple(_POOLING_FROM_PB[number] for number in numbers if number in _POOLING_FROM_PB)
    if len(set(modes)) != len(numbers):
        raise InvalidRequest("pooling must be of known modes, each at most once", param="pooling")
    return modes or (PoolingMode.MEAN,)
