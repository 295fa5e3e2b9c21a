"""Builds the response messages of one answer: reasoning, text, tool calls, tokens, ends and usage."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from router.api.answer.call_reader import CALLED, AnswerParser, CallPiece, Piece, ReasoningPiece, new_answer_parser
from router.api.answer.choice_text import TextCollector, TextDelta, TextSink
from router.api.answer.stream_cursor import StreamCursor
from router.api.answer.usage import CallUsage
from router.api.request.choice_selection import ChoiceSelection, VoteResult
from router.api.request.client_request import PreparedRequest
from router.api.selected_choices import select
from router.grpc.answer_writer import AnswerWriter
from router.sandbox.pattern_search import PatternSearch
from router.types.prompt_logprobs import ScoredPrompt
from tandem.protocol import wire
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb

_VALUES_PER_MESSAGE = 2048
"""Tokens and their alternatives per message: made in one turn of the loop, far below clients' message limits."""


class AnswerMessages:
    """Makes responses from deltas; those of one choice come in order."""

    def __init__(self, prepared: PreparedRequest, *, name: str) -> None:
        """`name`: the client's own id of the answer; empty: the request's id."""
        request = prepared.request
        self._name = name or request.request_id
        self._prompt = request.prompt_token_ids
        self._readers: list[AnswerParser] = []
        if prepared.calling is not None or prepared.reasoning is not None:
            self._readers = [new_answer_parser(prepared, i) for i in range(request.num_choices)]

    def scores(self, delta: TextDelta) -> list[Callable[[], pb.GenerateResponse]]:
        """Return the responses with the prompt's scores; none if it was not scored."""
        return [] if delta.scored is None else prompt_responses(self._name, self._prompt, delta.scored)

    def response(self, delta: TextDelta) -> pb.GenerateResponse:
        """Return the response of one delta."""
        response = pb.GenerateResponse(
            id=self._name,
            choice_index=delta.choice_index,
            token_ids=[token.token_id for token in delta.tokens],
            logprobs=[found for token in delta.tokens if (found := wire.logprobs_to_pb(token)) is not None],
        )
        reader = self._readers[delta.choice_index] if self._readers else None
        if reader is None:
            response.text = delta.text
        else:
            _add_pieces(response, reader.read(delta))
        if delta.finish is not None:
            reason = delta.finish.reason
            is_called = reader is not None and reader.finish(reason) == CALLED
            response.finish_reason = common.FINISH_REASON_TOOL_CALLS if is_called else wire.finish_reason_to_pb(reason)
        return response


def _add_pieces(response: pb.GenerateResponse, pieces: Sequence[Piece]) -> None:
    """Add the pieces to a response, with one entry per tool call."""
    for piece in pieces:
        if isinstance(piece, ReasoningPiece):
            response.reasoning_content += piece.text
            continue
        if not isinstance(piece, CallPiece):
            response.text += piece.text
            continue
        calls = response.tool_calls
        if not calls or calls[-1].index != piece.call:
            calls.add(index=piece.call)
        calls[-1].id = piece.id or calls[-1].id
        calls[-1].name = piece.name or calls[-1].name
        calls[-1].arguments += piece.arguments


def usage_message(usage: CallUsage) -> pb.Usage:
    """Return the usage of a whole call."""
    accepted, rejected = usage.prediction
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
        times=wire.times_to_pb(usage.times()),
    )


class GrpcAnswerStream(TextSink):
    """A `TextSink` that writes responses as text arrives."""

    def __init__(self, messages: AnswerMessages, cursor: StreamCursor, writer: AnswerWriter, usage: CallUsage) -> None:
        self._messages = messages
        self._cursor = cursor
        self._usage = usage
        self._writer = writer

    async def ready(self) -> None:
        await self._writer.flush()

    def on_delta(self, delta: TextDelta) -> bool:
        if delta.scored is not None:
            return any([self._writer.enqueue(part) for part in self._messages.scores(delta)])
        self._usage.add(delta)
        response = self._response(delta)
        return response is not None and self._writer.enqueue(response)

    def _response(self, delta: TextDelta) -> pb.GenerateResponse | None:
        """Return the response; None when the client has all of it: a continued stream is generated again from its
        start."""
        cursor, usage = self._cursor, self._usage
        if cursor.is_continued and cursor.has_ended(delta.choice_index):
            delta = TextDelta(choice_index=delta.choice_index)
        # Built from what the client has as well: tool calls are parsed from the beginning of the text.
        response = self._messages.response(delta)
        if cursor.is_continued and not (delta.text or delta.tokens or delta.finish or usage.complete):
            return None
        cursor.moved(delta)
        ended = () if delta.finish is None else (delta.choice_index,)
        response.stream_id = (cursor.id_of(ended=ended, usage_sent=usage.complete) or b"").decode()
        if usage.complete:
            response.usage.CopyFrom(usage_message(usage))
        return response


class CollectedAnswer(TextCollector):
    """A `TextSink` that sends only at the end: for selections and beam searches."""

    async def write(
        self,
        prepared: PreparedRequest,
        name: str,
        ask: ChoiceSelection | None,
        patterns: PatternSearch,
        writer: AnswerWriter,
        usage: CallUsage,
    ) -> None:
        """Return the responses to send. Raises InvalidRequest for a pattern that takes too long, and as the writer."""
        choices = self.choices()
        for choice in choices:
            usage.add(choice)
        selected = await select(ask, [prepared], choices, patterns)
        messages = AnswerMessages(selected.prepared[0], name=name)
        deltas = [TextDelta(0, scored=scored) for scored in self.scored_prompts.values()]
        for make in (make for delta in deltas for make in messages.scores(delta)):
            if writer.enqueue(make):
                await writer.flush()
        for number, choice in enumerate(selected.choices):
            vote = _vote(selected.votes[number], ask) if ask is not None and selected.votes else None
            is_last = number == len(selected.choices) - 1
            for part in _parts(choice):
                ends = usage if is_last and part.finish is not None else None
                if writer.enqueue(partial(_whole_response, messages, part, vote, ends)):
                    await writer.flush()


def _parts(choice: TextDelta) -> Iterator[TextDelta]:
    """Split a choice in two: all of its text with the first part, its end with the last."""
    tokens = choice.tokens
    step = max(1, _VALUES_PER_MESSAGE // (1 + len(tokens[0].top_logprobs))) if tokens else 1
    starts = range(0, max(1, len(tokens)), step)
    for start in starts:
        yield replace(
            choice,
            text="" if start else choice.text,
            tokens=tokens[start : start + step],
            finish=choice.finish if start == starts[-1] else None,
        )


def _whole_response(
    messages: AnswerMessages, part: TextDelta, vote: pb.Vote | None, usage: CallUsage | None
) -> pb.GenerateResponse:
    """`vote` and `usage`: set where a choice and the answer end."""
    response = messages.response(part)
    if vote is not None and part.finish is not None:
        response.vote.CopyFrom(vote)
    if usage is not None:
        response.usage.CopyFrom(usage_message(usage))
    return response


def _vote(vote: VoteResult, ask: ChoiceSelection) -> pb.Vote:
    return pb.Vote(answer=vote.answer, votes=vote.num_votes, of=ask.candidates)


def prompt_responses(
    request_id: str, prompt: Sequence[int], scored: ScoredPrompt
) -> list[Callable[[], pb.GenerateResponse]]:
    """Return functions that each make one response when it is about to be sent."""
    step = max(1, _VALUES_PER_MESSAGE // (1 + scored.num_top))
    return [
        partial(_response, request_id, prompt, scored, begin, min(begin + step, len(scored)))
        for begin in range(0, len(scored), step)
    ]


def _response(
    request_id: str, prompt: Sequence[int], scored: ScoredPrompt, begin: int, end: int
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        id=request_id, prompt_logprobs=[_place(prompt[i + 1], scored, i) for i in range(begin, end)]
    )


def _place(own: int, scored: ScoredPrompt, index: int) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        token_id=own,
        logprob=scored.logprobs[index],
        rank=scored.ranks[index],
        top=[common.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in scored.top(index)],
    )
