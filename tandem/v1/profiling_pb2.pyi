from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TraceRequest(_message.Message):
    __slots__ = ("num_steps", "timeout_s")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    timeout_s: float
    def __init__(self, num_steps: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("content", "num_steps")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    num_steps: int
    def __init__(self, content: _Optional[bytes] = ..., num_steps: _Optional[int] = ...) -> None: ...
