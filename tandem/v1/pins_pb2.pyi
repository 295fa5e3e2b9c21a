from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PinOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_OUTCOME_UNSPECIFIED: _ClassVar[PinOutcome]
    PIN_OUTCOME_HELD: _ClassVar[PinOutcome]
    PIN_OUTCOME_NOT_HERE: _ClassVar[PinOutcome]
    PIN_OUTCOME_NO_ROOM: _ClassVar[PinOutcome]
    PIN_OUTCOME_GAVE_WAY: _ClassVar[PinOutcome]
PIN_OUTCOME_UNSPECIFIED: PinOutcome
PIN_OUTCOME_HELD: PinOutcome
PIN_OUTCOME_NOT_HERE: PinOutcome
PIN_OUTCOME_NO_ROOM: PinOutcome
PIN_OUTCOME_GAVE_WAY: PinOutcome

class Pin(_message.Message):
    __slots__ = ("tenant", "name", "last_block", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    last_block: bytes
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., last_block: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ("tenant", "name")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PinResult(_message.Message):
    __slots__ = ("tenant", "name", "outcome", "num_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    outcome: PinOutcome
    num_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., outcome: _Optional[_Union[PinOutcome, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PinReport(_message.Message):
    __slots__ = ("num_pins", "num_blocks", "max_blocks", "made", "renewed", "refused", "gave_way", "expired")
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    GAVE_WAY_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    num_pins: int
    num_blocks: int
    max_blocks: int
    made: int
    renewed: int
    refused: int
    gave_way: int
    expired: int
    def __init__(self, num_pins: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ..., made: _Optional[int] = ..., renewed: _Optional[int] = ..., refused: _Optional[int] = ..., gave_way: _Optional[int] = ..., expired: _Optional[int] = ...) -> None: ...
