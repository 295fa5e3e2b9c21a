"""Versions of the hand-off protocol: which are supported, and which kinds of message each one added. Pure.

A new kind of message raises `SPOKEN.newest` and is listed here. 3: HELLO has a range of versions.
"""

from tandem.protocol.version_negotiation import Dialect, VersionRange

SPOKEN = VersionRange(oldest=2, newest=3)
KINDS = dict.fromkeys(
    (
        "hello",
        "prefill",
        "offer",
        "reserve",
        "reject",
        "chunk",
        "nack",
        "first_token",
        "seal",
        "commit_ack",
        "abort",
        "drained",
        "renew",
    ),
    2,
)
"""Of HandoffMessage, by the version that brought each."""


def handoff_dialect(version: int) -> Dialect:
    """What either end of a link may say."""
    return Dialect(version, KINDS)
