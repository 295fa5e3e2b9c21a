"""What generation yields, on every layer: tokens, reasons for ending, and where the time went."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a choice ended. The values are OpenAI's words, where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """Its time ran out while it waited. Within a worker only: a router is told of it as a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and the natural log of its probability under the unmodified distribution."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """One sampled token; `logprob` and `top_logprobs` only when the request asked for them.

    A named tuple, because it is made for every token: a frozen dataclass takes twice as long.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds one request spent in each phase; each measured by the process that spent it."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """From the last computed prompt token to the commit on the decode worker: the exposed transfer."""
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
