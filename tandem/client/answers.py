"""The client's results, and their conversion from messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.client.options import ToolCall, Turn
from tandem.protocol.wire import finish_reason_from_pb
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb

_TIMING = "tandem-timing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    """Those of `completion_tokens` up to the end of the model's reasoning."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's `prediction` that were verified as drafts and became output."""
    rejected_prediction_tokens: int = 0
    """Tokens of the request's `prediction` that were verified as drafts and did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbability:
    """Log probability of one token of an answer, and of the most likely alternatives."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProbability:
    """Log probability of one token of a prompt."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token among all alternatives; 1: it was the most likely."""
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """The beginning of a tool call, or more of its arguments."""

    index: int
    """Index of the call within its choice."""
    id: str
    """Empty, like `name`, except in the part that begins the call."""
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Result of a vote among choices."""

    answer: str | None
    """The winning answer; None: no choice had one."""
    votes: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one choice."""

    id: str
    choice_index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenProbability] = ()
    finish_reason: str | None = None
    """Set in the choice's last piece: stop, length or tool_calls."""
    usage: Usage | None = None
    """Set in the last piece of the call."""
    tool_calls: Sequence[CallPart] = ()
    prompt_logprobs: Sequence[PromptProbability] = ()
    """Log probabilities of the prompt's tokens after the first; sent before pieces with text."""
    vote: Vote | None = None
    """Set in the choice's last piece if a vote was requested."""
    reasoning_content: str = ""
    """Reasoning of the model before its answer; not part of `text`."""


@dataclass(slots=True, kw_only=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenProbability] = field(default_factory=list)
    finish_reason: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    vote: Vote | None = None
    reasoning_content: str = ""

    def turn(self) -> Turn:
        """The turn to append to the conversation."""
        thought = self.reasoning_content or None
        calls = tuple(self.tool_calls)
        return Turn(role="assistant", content=self.text, tool_calls=calls, reasoning_content=thought)

    def add(self, piece: Piece) -> None:
        """Append a piece to the choice so far."""
        self.text += piece.text
        self.reasoning_content += piece.reasoning_content
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.vote = piece.vote or self.vote
        for part in piece.tool_calls:
            if part.id:
                self.tool_calls.append(ToolCall(id=part.id, name=part.name, arguments=part.arguments))
            else:
                begun = self.tool_calls[-1]
                self.tool_calls[-1] = replace(begun, arguments=begun.arguments + part.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All choices of one call."""

    id: str
    choices: Sequence[Choice]
    usage: Usage
    timing: Mapping[str, Any]
    """Time per phase as the server reports it; see `X-Tandem-Timing` over HTTP."""
    prompt_logprobs: Sequence[PromptProbability] = ()
    """Log probabilities of the prompt's tokens after the first, if requested."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served."""

    id: str
    max_model_len: int
    created_s: int
    parent: str = ""
    """Of a LoRA adapter: the id of its model. Empty: the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedContent:
    """A beginning of conversations that is kept by name; times are Unix times in seconds."""

    name: str
    """Name for `Options.cached_content`."""
    num_tokens: int
    created_s: float
    updated_s: float
    expires_s: float
    display_name: str | None


def cached_of(message: pb.CachedContent) -> CachedContent:
    return CachedContent(
        name=message.name,
        num_tokens=message.num_tokens,
        created_s=message.created_s,
        updated_s=message.updated_s,
        expires_s=message.expires_s,
        display_name=message.display_name if message.HasField("display_name") else None,
    )


def piece_of(message: pb.GenerateResponse) -> Piece:
    usage = message.usage
    return Piece(
        id=message.id,
        choice_index=message.choice_index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(TokenProbability(logprob=one.logprob, top=_top_of(one.top)) for one in message.logprobs),
        finish_reason=_reason_of(message.finish_reason),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        )
        if message.HasField("usage")
        else None,
        tool_calls=tuple(
            CallPart(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ),
        prompt_logprobs=tuple(
            PromptProbability(token_id=one.token_id, logprob=one.logprob, rank=one.rank, top=_top_of(one.top))
            for one in message.prompt_logprobs
        ),
        vote=_vote_of(message.vote) if message.HasField("vote") else None,
        reasoning_content=message.reasoning_content,
    )


def _top_of(places: Iterable[common.TokenLogprob]) -> dict[int, float]:
    return {place.token_id: place.logprob for place in places}


def _vote_of(vote: pb.Vote) -> Vote:
    return Vote(answer=vote.answer if vote.HasField("answer") else None, votes=vote.votes, of=vote.of)


def _reason_of(number: int) -> str | None:
    if number == common.FINISH_REASON_TOOL_CALLS:
        return "tool_calls"
    return finish_reason_from_pb(number).value if number else None


def answer_of(pieces: Iterable[Piece], timing: Mapping[str, Any]) -> Answer:
    """Assemble an answer from its pieces. Raises ValueError when the last one is missing."""
    choices: dict[int, Choice] = {}
    name, usage, scores = "", None, list[PromptProbability]()
    for piece in pieces:
        choices.setdefault(piece.choice_index, Choice()).add(piece)
        scores += piece.prompt_logprobs
        name, usage = piece.id, piece.usage or usage
    if usage is None:
        raise ValueError("the last piece of the answer is missing")
    shown = [choice for _, choice in sorted(choices.items())]
    return Answer(id=name, choices=shown, usage=usage, timing=timing, prompt_logprobs=scores)


def vectors_of(answer: pb.EmbedResponse) -> list[list[float]]:
    """Vectors in the order of the inputs."""
    return [list(one.values) for one in answer.embeddings]


def timing_of(trailing: Iterable[tuple[str, str | bytes]] | None) -> Mapping[str, Any]:
    """Timing from the trailing metadata of an answer; empty when there is none."""
    text = next((value for key, value in trailing or () if key == _TIMING), None)
    return {} if text is None else dict(json.loads(text))
