"""Why attempts end, in words, by what ended them."""

from typing import Any

from kv_transfer.protocol.events import (
    BindRefused,
    HandoffCancelled,
    LinkLost,
    PeerFaulted,
    PrefillFailed,
    SubmitRefused,
    WriteFailed,
)
from kv_transfer.protocol.messages import Abort, Reject

SILENT = "no sign of life, or no progress, in time"


def failure_reason(cause: Any) -> str | None:
    """What a message or an event says has gone wrong; None: nothing by itself."""
    match cause:
        case BindRefused() | SubmitRefused() | PrefillFailed() | Reject():
            return cause.failure.message
        case Abort() | LinkLost() | PeerFaulted() | WriteFailed():
            return cause.reason
    return None


def end_reason(cause: Any) -> str:
    """What is told of an attempt that ended with `cause`, which is None for its timer."""
    if cause is None:
        return SILENT
    if isinstance(cause, HandoffCancelled):
        return cause.reason
    return failure_reason(cause) or f"after {type(cause).__name__}"
