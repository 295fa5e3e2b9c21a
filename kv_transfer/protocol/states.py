"""The states of a hand-off, the same for both halves, and the moves between them."""

from enum import Enum


class HandoffState(Enum):
    """State of one attempt of one hand-off; `NEXT` has the legal moves, none of which leads back."""

    NEW = "new"
    """Requested; the prompt waits in the prefill worker's queue."""
    OFFERED = "offered"
    """The prompt leaves the queue; destinations are being bound."""
    RESERVED = "reserved"
    """Destinations are bound and granted."""
    STREAMING = "streaming"
    SEALED = "sealed"
    """Everything is computed and the number of chunks is known."""
    COMMITTED = "committed"
    """Everything has landed and verified."""
    ABORTING = "aborting"
    """Failed; waiting for proof that nothing moves any more."""
    DRAINED = "drained"
    """Failed and proven quiet."""
    QUARANTINED = "quarantined"
    """Failed, and a writer may still be running: its destinations are not reused."""
    CLOSED = "closed"


LIVE = frozenset(
    {
        HandoffState.NEW,
        HandoffState.OFFERED,
        HandoffState.RESERVED,
        HandoffState.STREAMING,
        HandoffState.SEALED,
    }
)
"""States that may still end in a commit."""

NEXT: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.NEW: frozenset({HandoffState.OFFERED, HandoffState.ABORTING}),
    HandoffState.OFFERED: frozenset({HandoffState.RESERVED, HandoffState.ABORTING}),
    HandoffState.RESERVED: frozenset({HandoffState.STREAMING, HandoffState.SEALED, HandoffState.ABORTING}),
    HandoffState.STREAMING: frozenset({HandoffState.SEALED, HandoffState.ABORTING}),
    HandoffState.SEALED: frozenset({HandoffState.COMMITTED, HandoffState.ABORTING}),
    HandoffState.COMMITTED: frozenset({HandoffState.CLOSED}),
    HandoffState.ABORTING: frozenset({HandoffState.DRAINED, HandoffState.QUARANTINED}),
    HandoffState.DRAINED: frozenset({HandoffState.CLOSED}),
    HandoffState.QUARANTINED: frozenset({HandoffState.DRAINED}),
    HandoffState.CLOSED: frozenset(),
}
