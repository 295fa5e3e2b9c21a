from tandem.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffMessage(_message.Message):
    __slots__ = ("incarnation", "addressee", "transfer_id", "attempt", "hello", "prefill", "offer", "reserve", "reject", "chunk", "nack", "first_token", "seal", "commit_ack", "abort", "drained", "renew")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSEE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    addressee: int
    transfer_id: str
    attempt: int
    hello: HandoffHello
    prefill: Prefill
    offer: Offer
    reserve: Reserve
    reject: Reject
    chunk: Chunk
    nack: Nack
    first_token: FirstToken
    seal: Seal
    commit_ack: CommitAck
    abort: Abort
    drained: Drained
    renew: Renew
    def __init__(self, incarnation: _Optional[int] = ..., addressee: _Optional[int] = ..., transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., commit_ack: _Optional[_Union[CommitAck, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ...) -> None: ...

class HandoffHello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "layout", "transports", "wire_dtype", "newest_version", "more_regions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    MORE_REGIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    layout: _common_pb2.KVLayout
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    wire_dtype: str
    newest_version: int
    more_regions: _containers.RepeatedCompositeFieldContainer[RegionTransports]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., wire_dtype: _Optional[str] = ..., newest_version: _Optional[int] = ..., more_regions: _Optional[_Iterable[_Union[RegionTransports, _Mapping]]] = ...) -> None: ...

class RegionTransports(_message.Message):
    __slots__ = ("transports",)
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    def __init__(self, transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "advert", "host_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    advert: bytes
    host_id: str
    def __init__(self, name: _Optional[str] = ..., advert: _Optional[bytes] = ..., host_id: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "held_tokens", "sampling", "choice_index", "hash_root", "priority", "timeout_s", "request_id", "lease_s", "resume", "fetch", "names", "holder", "trace", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    held_tokens: int
    sampling: _common_pb2.SamplingParams
    choice_index: int
    hash_root: bytes
    priority: int
    timeout_s: float
    request_id: str
    lease_s: float
    resume: bool
    fetch: bool
    names: bytes
    holder: _common_pb2.PrefixHolder
    trace: str
    adapter: _common_pb2.Adapter
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., held_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., hash_root: _Optional[bytes] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., request_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., resume: bool = ..., fetch: bool = ..., names: _Optional[bytes] = ..., holder: _Optional[_Union[_common_pb2.PrefixHolder, _Mapping]] = ..., trace: _Optional[str] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("num_units", "queue_s", "tail_hash")
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TAIL_HASH_FIELD_NUMBER: _ClassVar[int]
    num_units: int
    queue_s: float
    tail_hash: bytes
    def __init__(self, num_units: _Optional[int] = ..., queue_s: _Optional[float] = ..., tail_hash: _Optional[bytes] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("num_units", "transport", "grant", "more_grants")
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    MORE_GRANTS_FIELD_NUMBER: _ClassVar[int]
    num_units: int
    transport: str
    grant: bytes
    more_grants: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, num_units: _Optional[int] = ..., transport: _Optional[str] = ..., grant: _Optional[bytes] = ..., more_grants: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _common_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("seq", "first_layer", "num_layers", "first_unit", "num_units", "first_head", "num_heads", "checksum", "rewrite", "write_s", "lane")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIT_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REWRITE_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    first_layer: int
    num_layers: int
    first_unit: int
    num_units: int
    first_head: int
    num_heads: int
    checksum: int
    rewrite: int
    write_s: float
    lane: int
    def __init__(self, seq: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_unit: _Optional[int] = ..., num_units: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., checksum: _Optional[int] = ..., rewrite: _Optional[int] = ..., write_s: _Optional[float] = ..., lane: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("seq", "rewrite")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REWRITE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    rewrite: int
    def __init__(self, seq: _Optional[int] = ..., rewrite: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "cached_tokens", "cached_by_source")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.Logprobs
    cached_tokens: int
    cached_by_source: _common_pb2.CachedTokens
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., cached_by_source: _Optional[_Union[_common_pb2.CachedTokens, _Mapping]] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("num_chunks", "cached_tokens", "times", "tail_hash")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TAIL_HASH_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    cached_tokens: int
    times: _common_pb2.PhaseTimes
    tail_hash: bytes
    def __init__(self, num_chunks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., times: _Optional[_Union[_common_pb2.PhaseTimes, _Mapping]] = ..., tail_hash: _Optional[bytes] = ...) -> None: ...

class CommitAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Renew(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...
