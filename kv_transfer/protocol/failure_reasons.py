"""Describes why an attempt ended, by its cause."""

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
    """The failure that a message or event reports; None when it reports none."""
    match cause:
        case BindRefused() | SubmitRefused() | PrefillFailed() | Reject():
            return cause.failure.message
        case Abort() | LinkLost() | PeerFaulted() | WriteFailed():
            return cause.reason
    return None


def end_reason(cause: Any) -> str:
    """The reason logged for an attempt that ended with `cause`, which is None for its timer."""
    if cause is None:
        return SILENT
    if isinstance(cause, HandoffCancelled):
        return cause.reason
    return failure_reason(cause) or f"after {type(cause).__name__}"
