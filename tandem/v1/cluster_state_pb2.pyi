from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRegistration(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: _session_pb2.WorkerRole
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[_session_pb2.WorkerRole, str]] = ..., address: _Optional[str] = ...) -> None: ...

class CacheLogHead(_message.Message):
    __slots__ = ("worker_id", "incarnation", "next_sequence", "state_sequence", "num_entries")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    next_sequence: int
    state_sequence: int
    num_entries: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., next_sequence: _Optional[int] = ..., state_sequence: _Optional[int] = ..., num_entries: _Optional[int] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("worker_id", "incarnation", "first_sequence", "names", "stored")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    first_sequence: int
    names: bytes
    stored: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_sequence: _Optional[int] = ..., names: _Optional[bytes] = ..., stored: _Optional[bytes] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("worker_id", "incarnation", "next_sequence", "names")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    next_sequence: int
    names: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., next_sequence: _Optional[int] = ..., names: _Optional[bytes] = ...) -> None: ...

class RouterLoad(_message.Message):
    __slots__ = ("router", "sequence", "shares", "tallies", "hears", "adapters")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    HEARS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    router: int
    sequence: int
    shares: _containers.RepeatedCompositeFieldContainer[RouterLoadShare]
    tallies: _containers.RepeatedCompositeFieldContainer[TenantTally]
    hears: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterChange]
    def __init__(self, router: _Optional[int] = ..., sequence: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[RouterLoadShare, _Mapping]]] = ..., tallies: _Optional[_Iterable[_Union[TenantTally, _Mapping]]] = ..., hears: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[AdapterChange, _Mapping]]] = ...) -> None: ...

class AdapterChange(_message.Message):
    __slots__ = ("name", "version", "adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    adapter: _common_pb2.Adapter
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class TenantTally(_message.Message):
    __slots__ = ("tenant", "epoch", "requests", "tokens", "num_inflight")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    epoch: int
    requests: int
    tokens: int
    num_inflight: int
    def __init__(self, tenant: _Optional[bytes] = ..., epoch: _Optional[int] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., num_inflight: _Optional[int] = ...) -> None: ...

class RouterLoadShare(_message.Message):
    __slots__ = ("worker_id", "incarnation", "report_number", "backlog_tokens", "num_requests", "backlog_since", "num_since")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_SINCE_FIELD_NUMBER: _ClassVar[int]
    NUM_SINCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    report_number: int
    backlog_tokens: int
    num_requests: int
    backlog_since: int
    num_since: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., report_number: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., num_requests: _Optional[int] = ..., backlog_since: _Optional[int] = ..., num_since: _Optional[int] = ...) -> None: ...
