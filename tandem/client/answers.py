"""What the client gives back, made from messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.outputs import FinishReason
from tandem.v1 import inference_pb2 as pb
from tandem.wire import finish_reason_from_pb

_TIMING = "tandem-timing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbability:
    """Log probability of one token of an answer, and of the most likely ones in its place."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one choice."""

    id: str
    choice_index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenProbability] = ()
    finish_reason: str | None = None
    """Of the choice's last piece: stop or length."""
    usage: Usage | None = None
    """Of the very last piece."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One whole choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenProbability] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All choices of one call."""

    id: str
    choices: Sequence[Choice]
    usage: Usage
    timing: Mapping[str, Any]
    """Where the time went, as the server tells it; see `X-Tandem-Timing` over HTTP."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One that is served."""

    id: str
    max_model_len: int
    created_s: int


def piece_of(message: pb.GenerateResponse) -> Piece:
    """One message."""
    reason = finish_reason_from_pb(message.finish_reason) if message.finish_reason else None
    usage = message.usage
    return Piece(
        id=message.id,
        choice_index=message.choice_index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenProbability(logprob=one.logprob, top={other.token_id: other.logprob for other in one.top})
            for one in message.logprobs
        ),
        finish_reason=_shown(reason),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
        if message.HasField("usage")
        else None,
    )


def _shown(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def answer_of(pieces: Iterable[Piece], timing: Mapping[str, Any]) -> Answer:
    """A whole answer. Raises ValueError when its end is missing."""
    choices: dict[int, Choice] = {}
    name, usage = "", None
    for piece in pieces:
        choice = choices.setdefault(piece.choice_index, Choice())
        choice.text += piece.text
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        name, usage = piece.id, piece.usage or usage
    if usage is None:
        raise ValueError("the answer has no end")
    return Answer(id=name, choices=[choice for _, choice in sorted(choices.items())], usage=usage, timing=timing)


def vectors_of(answer: pb.EmbedResponse) -> list[list[float]]:
    """In the order of what was asked."""
    return [list(one.values) for one in answer.embeddings]


def timing_of(trailing: Iterable[tuple[str, str | bytes]] | None) -> Mapping[str, Any]:
    """Of the metadata behind an answer; empty when there is none."""
    text = next((value for key, value in trailing or () if key == _TIMING), None)
    return {} if text is None else dict(json.loads(text))
