from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import handoff_pb2 as _handoff_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegionOrder(_message.Message):
    __slots__ = ("number", "open", "offer", "connect", "write", "cancel", "close", "grant", "verify", "revoke")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    number: int
    open: OpenEnds
    offer: OfferEnds
    connect: ConnectLane
    write: WriteCells
    cancel: CancelLane
    close: CloseLane
    grant: GrantLane
    verify: VerifyCells
    revoke: RevokeLane
    def __init__(self, number: _Optional[int] = ..., open: _Optional[_Union[OpenEnds, _Mapping]] = ..., offer: _Optional[_Union[OfferEnds, _Mapping]] = ..., connect: _Optional[_Union[ConnectLane, _Mapping]] = ..., write: _Optional[_Union[WriteCells, _Mapping]] = ..., cancel: _Optional[_Union[CancelLane, _Mapping]] = ..., close: _Optional[_Union[CloseLane, _Mapping]] = ..., grant: _Optional[_Union[GrantLane, _Mapping]] = ..., verify: _Optional[_Union[VerifyCells, _Mapping]] = ..., revoke: _Optional[_Union[RevokeLane, _Mapping]] = ...) -> None: ...

class RegionReport(_message.Message):
    __slots__ = ("number", "opened", "offers", "connected", "written", "granted", "verified", "failed", "quiet", "connection_broken")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_BROKEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    opened: EndsOpened
    offers: _handoff_pb2.RegionTransports
    connected: LaneConnected
    written: CellsWritten
    granted: LaneGranted
    verified: CellsVerified
    failed: str
    quiet: LaneKey
    connection_broken: bool
    def __init__(self, number: _Optional[int] = ..., opened: _Optional[_Union[EndsOpened, _Mapping]] = ..., offers: _Optional[_Union[_handoff_pb2.RegionTransports, _Mapping]] = ..., connected: _Optional[_Union[LaneConnected, _Mapping]] = ..., written: _Optional[_Union[CellsWritten, _Mapping]] = ..., granted: _Optional[_Union[LaneGranted, _Mapping]] = ..., verified: _Optional[_Union[CellsVerified, _Mapping]] = ..., failed: _Optional[str] = ..., quiet: _Optional[_Union[LaneKey, _Mapping]] = ..., connection_broken: bool = ...) -> None: ...

class LaneKey(_message.Message):
    __slots__ = ("transfer_id", "attempt", "lane")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    lane: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lane: _Optional[int] = ...) -> None: ...

class CellBox(_message.Message):
    __slots__ = ("first_layer", "num_layers", "first_unit", "num_units", "first_head", "num_heads")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIT_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    first_unit: int
    num_units: int
    first_head: int
    num_heads: int
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_unit: _Optional[int] = ..., num_units: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ...) -> None: ...

class OpenEnds(_message.Message):
    __slots__ = ("transport", "host", "isolated_network", "tcp_streams", "tls")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_NETWORK_FIELD_NUMBER: _ClassVar[int]
    TCP_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    host: str
    isolated_network: bool
    tcp_streams: int
    tls: CertificateFiles
    def __init__(self, transport: _Optional[str] = ..., host: _Optional[str] = ..., isolated_network: bool = ..., tcp_streams: _Optional[int] = ..., tls: _Optional[_Union[CertificateFiles, _Mapping]] = ...) -> None: ...

class CertificateFiles(_message.Message):
    __slots__ = ("cert", "key", "ca", "setting")
    CERT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CA_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    cert: str
    key: str
    ca: str
    setting: str
    def __init__(self, cert: _Optional[str] = ..., key: _Optional[str] = ..., ca: _Optional[str] = ..., setting: _Optional[str] = ...) -> None: ...

class EndsOpened(_message.Message):
    __slots__ = ("transports",)
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transports: _Optional[_Iterable[str]] = ...) -> None: ...

class OfferEnds(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectLane(_message.Message):
    __slots__ = ("lane", "destination", "offers", "wire_dtype")
    LANE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    lane: int
    destination: _common_pb2.KVLayout
    offers: _containers.RepeatedCompositeFieldContainer[_handoff_pb2.TransportOffer]
    wire_dtype: str
    def __init__(self, lane: _Optional[int] = ..., destination: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., offers: _Optional[_Iterable[_Union[_handoff_pb2.TransportOffer, _Mapping]]] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class LaneConnected(_message.Message):
    __slots__ = ("transport", "wire_dtype")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    wire_dtype: str
    def __init__(self, transport: _Optional[str] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class WriteCells(_message.Message):
    __slots__ = ("connection", "key", "grant", "cells", "held_tokens", "first_block", "blocks")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    connection: int
    key: LaneKey
    grant: bytes
    cells: CellBox
    held_tokens: int
    first_block: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, connection: _Optional[int] = ..., key: _Optional[_Union[LaneKey, _Mapping]] = ..., grant: _Optional[bytes] = ..., cells: _Optional[_Union[CellBox, _Mapping]] = ..., held_tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class CellsWritten(_message.Message):
    __slots__ = ("checksum", "num_bytes", "seconds")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    num_bytes: int
    seconds: float
    def __init__(self, checksum: _Optional[int] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CancelLane(_message.Message):
    __slots__ = ("connection", "key")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    connection: int
    key: LaneKey
    def __init__(self, connection: _Optional[int] = ..., key: _Optional[_Union[LaneKey, _Mapping]] = ...) -> None: ...

class CloseLane(_message.Message):
    __slots__ = ("connection",)
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    def __init__(self, connection: _Optional[int] = ...) -> None: ...

class GrantLane(_message.Message):
    __slots__ = ("key", "transport", "source", "wire_dtype", "held_tokens", "blocks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key: LaneKey
    transport: str
    source: _common_pb2.KVLayout
    wire_dtype: str
    held_tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[LaneKey, _Mapping]] = ..., transport: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., wire_dtype: _Optional[str] = ..., held_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class LaneGranted(_message.Message):
    __slots__ = ("token", "drain_proves_quiet")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_PROVES_QUIET_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    drain_proves_quiet: bool
    def __init__(self, token: _Optional[bytes] = ..., drain_proves_quiet: bool = ...) -> None: ...

class VerifyCells(_message.Message):
    __slots__ = ("key", "transport", "cells", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: LaneKey
    transport: str
    cells: CellBox
    checksum: int
    def __init__(self, key: _Optional[_Union[LaneKey, _Mapping]] = ..., transport: _Optional[str] = ..., cells: _Optional[_Union[CellBox, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class CellsVerified(_message.Message):
    __slots__ = ("intact",)
    INTACT_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    def __init__(self, intact: bool = ...) -> None: ...

class RevokeLane(_message.Message):
    __slots__ = ("key", "transport")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    key: LaneKey
    transport: str
    def __init__(self, key: _Optional[_Union[LaneKey, _Mapping]] = ..., transport: _Optional[str] = ...) -> None: ...
