"""Versions of the hand-off protocol: which are supported, and which added each kind of message. Pure.

A new kind of message raises `SPOKEN.newest` and is listed here. 3: HELLO has a range of versions. 4: a worker's pool
may be in several regions. 5: windowed layers may be kept apart. 6: a prompt may be computed with a LoRA adapter.
"""

from tandem.protocol.version_negotiation import Dialect, VersionRange

SPOKEN = VersionRange(oldest=2, newest=6)
REGIONS = 4
"""Version that introduced regions: an older peer would send everything to the first, or expect it from there."""
WINDOWS = 5
"""Version that introduced groups of layers: an older peer would expect all layers of every token in one lane."""
ADAPTERS = 6
"""Version that introduced adapters: an older peer would compute a prompt without the one that it is ordered with."""
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
"""Version that introduced each kind of HandoffMessage."""


def handoff_dialect(version: int) -> Dialect:
    """The kinds of message that may be sent on a link of this version."""
    return Dialect(version, KINDS)


def spoken_with(num_regions: int, *, has_groups: bool = False) -> VersionRange:
    """The versions that a worker of so many regions supports; `has_groups`: its windowed layers are kept apart."""
    oldest = WINDOWS if has_groups else SPOKEN.oldest if num_regions == 1 else REGIONS
    return VersionRange(oldest=oldest, newest=SPOKEN.newest)
