"""The part of a streamed answer that a client has: what the `id` of an event says (`router.api.answer.stream_ids`)."""

from dataclasses import dataclass, field

from tandem.values.ids import Incarnation


@dataclass(slots=True, kw_only=True)
class ChoicePosition:
    """The part of one choice that a client has."""

    worker: Incarnation = Incarnation(0)  # noqa: RUF009  # an int
    """Incarnation of the decode worker that computes it."""
    num_tokens: int = 0
    num_chars: int = 0
    ended: bool = False
    """Whether its finish was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """The part that all ids of one stream share."""

    request_id: str
    """Request id: 32 hex digits."""
    seed: int
    created_s: int
    """Unix time of the first router's answer."""
    digest: bytes
    """Digest of the request, DIGEST_BYTES long; see `request_digest`."""
    resumptions: int = 0
    """Number of times that the stream has been continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    head: StreamHead
    choices: tuple[ChoicePosition, ...]
    usage_sent: bool
    """Whether only the end mark is missing."""
    age_s: float = field(default=0.0, compare=False)
    """Seconds since the stream began, when the id was read."""
