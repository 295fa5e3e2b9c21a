"""The text of one choice from its tokens: detokenized, cut at stop strings, joined unless it is streamed. Pure."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from router.api.request.client_request import PreparedRequest
from router.text.stop_strings import StopMatcher
from router.text.tokenizer import Tokenizer
from router.types.prompt_logprobs import ScoredPrompt
from router.types.requests import ChoiceDelta, ChoiceFinish, PlainEvents
from router.types.stream_position import ChoicePosition
from tandem.errors import InternalError
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason, SampledToken, bare_token


class TextDelta(Struct, frozen=True):
    """New text of one choice, the tokens counted with it, its end, or all three."""

    choice_index: int
    """Index over all prompts of the client's call: prompt number times `n` plus the choice."""
    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish: ChoiceFinish | None = None
    stopped_by: str | int | None = None
    """With `finish`: the stop string or stop token that ended the choice."""
    worker: Incarnation = Incarnation(0)
    """Incarnation of the decode worker that sent it."""
    passed: tuple[SampledToken, ...] = ()
    """In a continued stream, tokens before these that the client already has."""
    passed_text: str = ""
    """In a continued stream, text before this that the client already has."""
    scored: ScoredPrompt | None = None
    """Scores of the prompt whose first choice this is, sent before its tokens."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was reused, see ChoiceDelta."""


class TextSink(Protocol):
    """Receives a client call's text as it arrives; see `router.types.requests.DeltaSink`."""

    def on_delta(self, delta: TextDelta) -> bool:
        """Handle the next delta; return whether to await `ready` before another."""
        ...

    def on_text(self, choice_index: int, token_id: int, text: str) -> bool:
        """Handle a token that comes with nothing else, and the text that became certain with it; as `on_delta`."""
        return self.on_delta(TextDelta(choice_index, text, (bare_token(token_id),)))

    def plain_events(self, choice_index: int) -> PlainEvents | None:
        """Return how to write the next tokens' events; None where that is more than their text, or not possible."""
        return None

    def on_written(self, count: int) -> None:
        """Count tokens that were written as `plain_events` says."""
        return

    async def ready(self) -> None:
        """Wait until there is room again. Raises the error that ends the call."""
        ...


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._index = index
        self._includes_stop = prepared.include_stop
        skips, shown_ids = prepared.skip_special_tokens, prepared.shown_ids
        self._words = tokenizer.detokenizer(skip_special_tokens=skips, shown_ids=shown_ids)
        self._matcher = StopMatcher(prepared.stops, include_match=prepared.include_stop) if prepared.stops else None
        self.has_stops = self._matcher is not None
        self._stop_token_ids = prepared.stop_token_ids
        self._min_tokens = prepared.request.sampling.min_tokens
        self._stop_token: int | None = None
        self._num_tokens = 0
        self.finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was seen; tokens that still arrive are not part of the answer."""
        return self._matcher is not None and self._matcher.match is not None

    def push(self, token_id: int) -> str | None:
        """Return the text of a token that comes with nothing else; None where it could be an end: then `feed` it."""
        if self.has_stops or token_id in self._stop_token_ids:
            return None
        self._num_tokens += 1
        return self._words.push(token_id)

    @property
    def plain_stop_ids(self) -> frozenset[int] | None:
        """Where the text of the next token is its own (`JsonTexts`): the tokens of which it is not; else None."""
        return None if self.has_stops or not self._words.holds_nothing else self._stop_token_ids

    def on_written(self, count: int) -> None:
        """Count tokens whose text did not come through here."""
        self._num_tokens += count

    def feed(self, delta: ChoiceDelta) -> TextDelta | None:
        """Turn dispatch's delta into the client's; None when there is nothing to send."""
        tokens, finish, matcher = delta.tokens, delta.finish, self._matcher
        text: list[str] = []
        if self.has_stops or self.finished:
            tokens = self._until_stop(tokens, text)
        else:
            token_ids = [token.token_id for token in tokens]
            if self._stop_token_ids.isdisjoint(token_ids):
                self._num_tokens += len(token_ids)
                text.append(self._words.push_all(token_ids))
            else:
                text += map(self._push, token_ids)
            if finish is None and tokens:
                shown, cached = "".join(text), delta.cached_tokens
                return TextDelta(self._index, shown, tokens, None, None, delta.worker, cached_tokens=cached)
        if finish is not None:
            self.finished = True
            if finish.reason is FinishReason.ERROR:
                raise InternalError("generation failed")
            if matcher is None:
                text.append(self._words.flush())
            elif matcher.match is None:
                text += [matcher.feed(self._words.flush()), matcher.flush()]
            if matcher is not None and matcher.match is not None:
                # The worker may have reached another end between the match and our request to stop.
                finish = replace(finish, reason=FinishReason.STOP)
        if not tokens and finish is None:
            return None
        match = None if matcher is None else matcher.match
        return TextDelta(
            choice_index=self._index,
            text="".join(text),
            tokens=tokens,
            finish=finish,
            stopped_by=(match or self._stop_token) if finish else None,
            worker=delta.worker,
            cached_tokens=delta.cached_tokens,
        )

    def _until_stop(self, tokens: Sequence[SampledToken], text: list[str]) -> tuple[SampledToken, ...]:
        """Return the tokens that count; appends their text."""
        counted: list[SampledToken] = []
        for token in tokens:
            if self.stopped or self.finished:
                break
            counted.append(token)
            text.append(self._push(token.token_id))
        return tuple(counted)

    def _push(self, token_id: int) -> str:
        self._num_tokens += 1
        early = self._num_tokens <= self._min_tokens
        if token_id in self._stop_token_ids and not early:
            self._stop_token = token_id
            if not self._includes_stop:
                return ""
        text = self._words.push(token_id)
        # Text of the first `min_tokens` tokens neither stops the choice nor begins a stop string.
        return text if early or self._matcher is None else self._matcher.feed(text)


class ResumeFilter:
    """Reduces one choice to what the client still lacks: a continued stream is generated again from its first token."""

    def __init__(self, has: ChoicePosition) -> None:
        self._num_tokens = has.num_tokens
        self._num_chars = has.num_chars

    def unseen(self, delta: TextDelta) -> TextDelta:
        """Return the part that is new. A finish is repeated, because usage needs it."""
        if not self._num_tokens and not self._num_chars:
            return delta
        tokens = min(self._num_tokens, len(delta.tokens))
        chars = min(self._num_chars, len(delta.text))
        self._num_tokens -= tokens
        self._num_chars -= chars
        return replace(
            delta,
            tokens=delta.tokens[tokens:],
            text=delta.text[chars:],
            passed=delta.tokens[:tokens],
            passed_text=delta.text[:chars],
        )


class TextCollector(TextSink):
    """A `TextSink` that collects a call's whole answer."""

    def __init__(self) -> None:
        self._parts: dict[int, list[TextDelta]] = {}
        self.scored_prompts: dict[int, ScoredPrompt] = {}
        """Prompt scores, by the index of each prompt's first choice."""

    async def ready(self) -> None:
        """Return at once: there is always room."""

    def on_delta(self, delta: TextDelta) -> bool:
        if delta.scored is not None:
            self.scored_prompts[delta.choice_index] = delta.scored
            return False
        self._parts.setdefault(delta.choice_index, []).append(delta)
        return False

    def choices(self) -> list[TextDelta]:
        """Return one delta per choice with its whole answer, in order of the choices."""
        return [parts[0] if len(parts) == 1 else _joined(parts) for _, parts in sorted(self._parts.items())]


def _joined(parts: Sequence[TextDelta]) -> TextDelta:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
    )
