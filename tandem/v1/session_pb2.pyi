from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import pins_pb2 as _pins_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class PoolingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_MODE_UNSPECIFIED: _ClassVar[PoolingMode]
    POOLING_MODE_CLS: _ClassVar[PoolingMode]
    POOLING_MODE_MAX: _ClassVar[PoolingMode]
    POOLING_MODE_MEAN: _ClassVar[PoolingMode]
    POOLING_MODE_MEAN_SQRT_LEN: _ClassVar[PoolingMode]
    POOLING_MODE_WEIGHTED_MEAN: _ClassVar[PoolingMode]
    POOLING_MODE_LAST: _ClassVar[PoolingMode]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
POOLING_MODE_UNSPECIFIED: PoolingMode
POOLING_MODE_CLS: PoolingMode
POOLING_MODE_MAX: PoolingMode
POOLING_MODE_MEAN: PoolingMode
POOLING_MODE_MEAN_SQRT_LEN: PoolingMode
POOLING_MODE_WEIGHTED_MEAN: PoolingMode
POOLING_MODE_LAST: PoolingMode

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "reroute", "fetch_cache", "cache_offer_ended", "take_over", "resync", "orders", "end_earlier_sessions", "score_prompt", "pin", "unpin")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REROUTE_FIELD_NUMBER: _ClassVar[int]
    FETCH_CACHE_FIELD_NUMBER: _ClassVar[int]
    CACHE_OFFER_ENDED_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    END_EARLIER_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SCORE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    reroute: Reroute
    fetch_cache: FetchCache
    cache_offer_ended: CacheOfferEnded
    take_over: TakeOver
    resync: Resync
    orders: Orders
    end_earlier_sessions: EndEarlierSessions
    score_prompt: ScorePrompt
    pin: _pins_pb2.Pin
    unpin: _pins_pb2.Unpin
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., reroute: _Optional[_Union[Reroute, _Mapping]] = ..., fetch_cache: _Optional[_Union[FetchCache, _Mapping]] = ..., cache_offer_ended: _Optional[_Union[CacheOfferEnded, _Mapping]] = ..., take_over: _Optional[_Union[TakeOver, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., orders: _Optional[_Union[Orders, _Mapping]] = ..., end_earlier_sessions: _Optional[_Union[EndEarlierSessions, _Mapping]] = ..., score_prompt: _Optional[_Union[ScorePrompt, _Mapping]] = ..., pin: _Optional[_Union[_pins_pb2.Pin, _Mapping]] = ..., unpin: _Optional[_Union[_pins_pb2.Unpin, _Mapping]] = ...) -> None: ...

class Orders(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[RouterMessage]
    def __init__(self, orders: _Optional[_Iterable[_Union[RouterMessage, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "reads_redis", "newest_version", "direct", "load_period_s")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READS_REDIS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    LOAD_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: int
    reads_redis: bool
    newest_version: int
    direct: bool
    load_period_s: float
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., reads_redis: bool = ..., newest_version: _Optional[int] = ..., direct: bool = ..., load_period_s: _Optional[float] = ...) -> None: ...

class PrefillRoute(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "transfer_id", "attempt", "holder")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    address: str
    transfer_id: str
    attempt: int
    holder: _common_pb2.PrefixHolder
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., holder: _Optional[_Union[_common_pb2.PrefixHolder, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "generated_token_ids", "sampling", "choice_index", "hash_root", "priority", "timeout_s", "prefill", "holder", "trace", "tokens_per_message", "handle", "prompt", "prediction", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    choice_index: int
    hash_root: bytes
    priority: int
    timeout_s: float
    prefill: PrefillRoute
    holder: _common_pb2.PrefixHolder
    trace: str
    tokens_per_message: int
    handle: int
    prompt: bytes
    prediction: bytes
    adapter: _common_pb2.Adapter
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., hash_root: _Optional[bytes] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., prefill: _Optional[_Union[PrefillRoute, _Mapping]] = ..., holder: _Optional[_Union[_common_pb2.PrefixHolder, _Mapping]] = ..., trace: _Optional[str] = ..., tokens_per_message: _Optional[int] = ..., handle: _Optional[int] = ..., prompt: _Optional[bytes] = ..., prediction: _Optional[bytes] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class ScorePrompt(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "hash_root", "priority", "timeout_s", "num_top", "num_next", "pooling", "num_skipped", "through_head", "label_token_ids", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    NUM_NEXT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    THROUGH_HEAD_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    hash_root: bytes
    priority: int
    timeout_s: float
    num_top: int
    num_next: int
    pooling: _containers.RepeatedScalarFieldContainer[PoolingMode]
    num_skipped: int
    through_head: bool
    label_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: _common_pb2.Adapter
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., hash_root: _Optional[bytes] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., num_top: _Optional[int] = ..., num_next: _Optional[int] = ..., pooling: _Optional[_Iterable[_Union[PoolingMode, str]]] = ..., num_skipped: _Optional[int] = ..., through_head: bool = ..., label_token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class EndEarlierSessions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class TakeOver(_message.Message):
    __slots__ = ("request_id", "attempt", "num_shown", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SHOWN_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_shown: int
    handle: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_shown: _Optional[int] = ..., handle: _Optional[int] = ...) -> None: ...

class Reroute(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill: PrefillRoute
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill: _Optional[_Union[PrefillRoute, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "tokens", "refused", "transfer_failed", "kv_events", "load", "draining", "cache_offer", "cache_fetched", "prompt_scores", "pin_result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CACHE_OFFER_FIELD_NUMBER: _ClassVar[int]
    CACHE_FETCHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    PIN_RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    tokens: StepTokens
    refused: Refused
    transfer_failed: TransferFailed
    kv_events: KVEvents
    load: LoadSnapshot
    draining: Draining
    cache_offer: CacheOffer
    cache_fetched: CacheFetched
    prompt_scores: PromptScores
    pin_result: _pins_pb2.PinResult
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., tokens: _Optional[_Union[StepTokens, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., transfer_failed: _Optional[_Union[TransferFailed, _Mapping]] = ..., kv_events: _Optional[_Union[KVEvents, _Mapping]] = ..., load: _Optional[_Union[LoadSnapshot, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., cache_offer: _Optional[_Union[CacheOffer, _Mapping]] = ..., cache_fetched: _Optional[_Union[CacheFetched, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScores, _Mapping]] = ..., pin_result: _Optional[_Union[_pins_pb2.PinResult, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "role", "model_name", "max_model_len", "num_blocks", "layout", "handoff_address", "transports", "vocab_size", "eos_token_ids", "num_blocks_below", "newest_version", "rack", "direct_port", "direct_ticket")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BELOW_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    DIRECT_PORT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_TICKET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: int
    role: WorkerRole
    model_name: str
    max_model_len: int
    num_blocks: int
    layout: _common_pb2.KVLayout
    handoff_address: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_blocks_below: int
    newest_version: int
    rack: str
    direct_port: int
    direct_ticket: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., model_name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., handoff_address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_blocks_below: _Optional[int] = ..., newest_version: _Optional[int] = ..., rack: _Optional[str] = ..., direct_port: _Optional[int] = ..., direct_ticket: _Optional[bytes] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("deltas", "handoffs", "handles", "indexes", "token_ids")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    handoffs: _containers.RepeatedCompositeFieldContainer[CommittedHandoff]
    handles: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[CommittedHandoff, _Mapping]]] = ..., handles: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommittedHandoff(_message.Message):
    __slots__ = ("worker_id", "incarnation", "num_tokens", "exposed_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    num_tokens: int
    exposed_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., num_tokens: _Optional[int] = ..., exposed_s: _Optional[float] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "attempt", "first_index", "token_ids", "logprobs", "finish", "started", "prediction")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.Logprobs]
    finish: Finish
    started: Started
    prediction: PredictionUse
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.Logprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., prediction: _Optional[_Union[PredictionUse, _Mapping]] = ...) -> None: ...

class PredictionUse(_message.Message):
    __slots__ = ("accepted", "rejected")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    rejected: int
    def __init__(self, accepted: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("cached_tokens", "times")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    times: _common_pb2.PhaseTimes
    def __init__(self, cached_tokens: _Optional[int] = ..., times: _Optional[_Union[_common_pb2.PhaseTimes, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "failure", "cached_tokens", "times")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    failure: _common_pb2.Failure
    cached_tokens: int
    times: _common_pb2.PhaseTimes
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., times: _Optional[_Union[_common_pb2.PhaseTimes, _Mapping]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("request_id", "attempt", "logprobs", "ranks", "top_ids", "top_logprobs", "mean", "times")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    mean: _containers.RepeatedScalarFieldContainer[float]
    times: _common_pb2.PhaseTimes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., mean: _Optional[_Iterable[float]] = ..., times: _Optional[_Union[_common_pb2.PhaseTimes, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "attempt", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    failure: _common_pb2.Failure
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class TransferFailed(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer_id", "landed_tokens", "reason", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    LANDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    transfer_id: str
    landed_tokens: int
    reason: str
    failure: _common_pb2.Failure
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., transfer_id: _Optional[str] = ..., landed_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class KVEvents(_message.Message):
    __slots__ = ("first_sequence", "cleared", "events")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    cleared: bool
    events: _containers.RepeatedCompositeFieldContainer[KVEvent]
    def __init__(self, first_sequence: _Optional[int] = ..., cleared: bool = ..., events: _Optional[_Iterable[_Union[KVEvent, _Mapping]]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KVEvent(_message.Message):
    __slots__ = ("block_hash", "stored")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    stored: bool
    def __init__(self, block_hash: _Optional[bytes] = ..., stored: bool = ...) -> None: ...

class LoadSnapshot(_message.Message):
    __slots__ = ("num_running", "num_waiting", "backlog_tokens", "num_free_blocks", "num_total_blocks", "prefill_tokens_per_s", "decode_step_s", "kv_bytes_per_s", "num_quarantined_blocks", "num_reserved", "cache_tiers", "context_tokens", "transfers", "report_number", "redis_publishing", "step_age_s", "pins", "work", "resident_adapters", "adapters")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    CACHE_TIERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    REPORT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REDIS_PUBLISHING_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    backlog_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    kv_bytes_per_s: float
    num_quarantined_blocks: int
    num_reserved: int
    cache_tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    context_tokens: int
    transfers: TransferReport
    report_number: int
    redis_publishing: RedisPublisherReport
    step_age_s: float
    pins: _pins_pb2.PinReport
    work: WorkReport
    resident_adapters: _containers.RepeatedScalarFieldContainer[str]
    adapters: AdapterReport
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., kv_bytes_per_s: _Optional[float] = ..., num_quarantined_blocks: _Optional[int] = ..., num_reserved: _Optional[int] = ..., cache_tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ..., context_tokens: _Optional[int] = ..., transfers: _Optional[_Union[TransferReport, _Mapping]] = ..., report_number: _Optional[int] = ..., redis_publishing: _Optional[_Union[RedisPublisherReport, _Mapping]] = ..., step_age_s: _Optional[float] = ..., pins: _Optional[_Union[_pins_pb2.PinReport, _Mapping]] = ..., work: _Optional[_Union[WorkReport, _Mapping]] = ..., resident_adapters: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Union[AdapterReport, _Mapping]] = ...) -> None: ...

class AdapterReport(_message.Message):
    __slots__ = ("loads", "evictions", "failures", "load_seconds", "num_waiting", "held_bytes", "capacity_bytes")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    loads: int
    evictions: int
    failures: int
    load_seconds: float
    num_waiting: int
    held_bytes: int
    capacity_bytes: int
    def __init__(self, loads: _Optional[int] = ..., evictions: _Optional[int] = ..., failures: _Optional[int] = ..., load_seconds: _Optional[float] = ..., num_waiting: _Optional[int] = ..., held_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("prefill", "decode", "preemptions", "resident_bytes", "weights_bytes", "kv_bytes", "flops_per_token", "step_sizes", "drafts")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_SIZES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    prefill: StepTotals
    decode: StepTotals
    preemptions: int
    resident_bytes: int
    weights_bytes: int
    kv_bytes: int
    flops_per_token: int
    step_sizes: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftTotals]
    def __init__(self, prefill: _Optional[_Union[StepTotals, _Mapping]] = ..., decode: _Optional[_Union[StepTotals, _Mapping]] = ..., preemptions: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., flops_per_token: _Optional[int] = ..., step_sizes: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[_Union[DraftTotals, _Mapping]]] = ...) -> None: ...

class DraftTotals(_message.Message):
    __slots__ = ("source", "drafts", "draft_tokens", "accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    drafts: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[str] = ..., drafts: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., accepted_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTotals(_message.Message):
    __slots__ = ("steps", "seconds", "tokens", "requests", "draft_tokens", "accepted_tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    seconds: float
    tokens: int
    requests: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, steps: _Optional[int] = ..., seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., requests: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class RedisPublisherReport(_message.Message):
    __slots__ = ("up", "connects", "entries", "states", "lag_s")
    UP_FIELD_NUMBER: _ClassVar[int]
    CONNECTS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    up: bool
    connects: int
    entries: int
    states: int
    lag_s: float
    def __init__(self, up: bool = ..., connects: _Optional[int] = ..., entries: _Optional[int] = ..., states: _Optional[int] = ..., lag_s: _Optional[float] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("tier", "num_blocks", "capacity_blocks", "hits", "misses", "stores", "evictions", "stored_bytes", "store_s", "loaded_bytes", "load_s", "dropped", "damaged", "late")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_S_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_blocks: int
    capacity_blocks: int
    hits: int
    misses: int
    stores: int
    evictions: int
    stored_bytes: int
    store_s: float
    loaded_bytes: int
    load_s: float
    dropped: int
    damaged: int
    late: int
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., stores: _Optional[int] = ..., evictions: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., store_s: _Optional[float] = ..., loaded_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., dropped: _Optional[int] = ..., damaged: _Optional[int] = ..., late: _Optional[int] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("sent", "received", "fetches_started", "fetches_completed", "fetches_failed", "fetches_declined", "fetched_tokens", "lent_tokens", "pinned_blocks", "leased_blocks", "quarantined_blocks", "loans", "inherited")
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_STARTED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FAILED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_DECLINED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOANS_FIELD_NUMBER: _ClassVar[int]
    INHERITED_FIELD_NUMBER: _ClassVar[int]
    sent: TransferSide
    received: TransferSide
    fetches_started: int
    fetches_completed: int
    fetches_failed: int
    fetches_declined: int
    fetched_tokens: int
    lent_tokens: int
    pinned_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    loans: int
    inherited: _containers.RepeatedCompositeFieldContainer[MigratedBlocks]
    def __init__(self, sent: _Optional[_Union[TransferSide, _Mapping]] = ..., received: _Optional[_Union[TransferSide, _Mapping]] = ..., fetches_started: _Optional[int] = ..., fetches_completed: _Optional[int] = ..., fetches_failed: _Optional[int] = ..., fetches_declined: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., lent_tokens: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., loans: _Optional[int] = ..., inherited: _Optional[_Iterable[_Union[MigratedBlocks, _Mapping]]] = ...) -> None: ...

class MigratedBlocks(_message.Message):
    __slots__ = ("outcome", "blocks", "num_bytes")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    blocks: int
    num_bytes: int
    def __init__(self, outcome: _Optional[str] = ..., blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TransferSide(_message.Message):
    __slots__ = ("started", "ended", "bad_messages", "live", "bytes_per_s")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    BAD_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    started: int
    ended: _containers.RepeatedCompositeFieldContainer[TransferEnds]
    bad_messages: int
    live: int
    bytes_per_s: float
    def __init__(self, started: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[TransferEnds, _Mapping]]] = ..., bad_messages: _Optional[int] = ..., live: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class TransferEnds(_message.Message):
    __slots__ = ("fetch", "transport", "outcome", "count", "num_bytes", "seconds", "chunks", "damaged_chunks")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    fetch: bool
    transport: str
    outcome: str
    count: int
    num_bytes: int
    seconds: float
    chunks: int
    damaged_chunks: int
    def __init__(self, fetch: bool = ..., transport: _Optional[str] = ..., outcome: _Optional[str] = ..., count: _Optional[int] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., chunks: _Optional[int] = ..., damaged_chunks: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CachedChain(_message.Message):
    __slots__ = ("after", "from_root", "names")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FROM_ROOT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    from_root: bool
    names: bytes
    def __init__(self, after: _Optional[bytes] = ..., from_root: bool = ..., names: _Optional[bytes] = ...) -> None: ...

class CacheOffer(_message.Message):
    __slots__ = ("chains", "lends_s")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    LENDS_S_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedCompositeFieldContainer[CachedChain]
    lends_s: float
    def __init__(self, chains: _Optional[_Iterable[_Union[CachedChain, _Mapping]]] = ..., lends_s: _Optional[float] = ...) -> None: ...

class CacheOfferEnded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchCache(_message.Message):
    __slots__ = ("holder", "block_size", "chains", "within_s", "prefill_tokens_per_s")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    holder: _common_pb2.PrefixHolder
    block_size: int
    chains: _containers.RepeatedCompositeFieldContainer[CachedChain]
    within_s: float
    prefill_tokens_per_s: float
    def __init__(self, holder: _Optional[_Union[_common_pb2.PrefixHolder, _Mapping]] = ..., block_size: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[CachedChain, _Mapping]]] = ..., within_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class CacheFetched(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...
