"""Text of one choice from its tokens: detokenized, cut at stop strings, joined unless it is streamed. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from router.api.request.client_request import PreparedRequest
from router.text.stop_strings import StopMatcher
from router.text.tokenizer import Tokenizer
from router.types.prompt_logprobs import ScoredPrompt
from router.types.requests import ChoiceDelta, ChoiceFinish
from router.types.stream_ids import ChoicePosition
from tandem.errors import InternalError
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason, SampledToken


class TextDelta(NamedTuple):
    """New text of one choice, the tokens counted with it, its end, or all three."""

    choice_index: int
    """Over all prompts of the client's call: prompt number times `n` plus the choice."""
    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish: ChoiceFinish | None = None
    stopped_by: str | int | None = None
    """With `finish`: the stop string or stop token that ended the choice."""
    worker: Incarnation = Incarnation(0)
    """The decode worker's process that it came from."""
    passed: tuple[SampledToken, ...] = ()
    """Of a stream that is continued: tokens before these that the client has."""
    passed_text: str = ""
    """As `passed`: text before this."""
    reading: ScoredPrompt | None = None
    """Of the prompt whose first choice this is, before its tokens."""
    cached_tokens: int | None = None
    """See ChoiceDelta."""


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._index = index
        self._includes_stop = prepared.include_stop
        skips, shown_ids = prepared.skip_special_tokens, prepared.shown_ids
        self._words = tokenizer.detokenizer(skip_special_tokens=skips, shown_ids=shown_ids)
        self._matcher = StopMatcher(prepared.stops, include_match=prepared.include_stop)
        self.has_stops = bool(prepared.stops)
        self._stop_token_ids = prepared.stop_token_ids
        self._min_tokens = prepared.request.sampling.min_tokens
        self._stop_token: int | None = None
        self._num_tokens = 0
        self.finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was seen; tokens that still arrive are not part of the answer."""
        return self._matcher.match is not None

    def feed(self, delta: ChoiceDelta) -> TextDelta | None:
        """What dispatch's delta means to the client; None when nothing."""
        tokens, finish = delta.tokens, delta.finish
        text: list[str] = []
        if self.has_stops or self.finished:
            tokens = self._until_stop(tokens, text)
        else:
            for token in tokens:
                text.append(self._push(token.token_id))
            if finish is None and tokens:
                shown, cached = "".join(text), delta.cached_tokens
                return TextDelta(self._index, shown, tokens, None, None, delta.worker, cached_tokens=cached)
        if finish is not None:
            self.finished = True
            if finish.reason is FinishReason.ERROR:
                raise InternalError("generation failed")
            if not self.stopped:
                text += [self._matcher.feed(self._words.flush()), self._matcher.flush()]
            if self.stopped:
                # The worker may have met another end between the match and our word to it.
                finish = replace(finish, reason=FinishReason.STOP)
        if not tokens and finish is None:
            return None
        return TextDelta(
            choice_index=self._index,
            text="".join(text),
            tokens=tokens,
            finish=finish,
            stopped_by=(self._matcher.match or self._stop_token) if finish else None,
            worker=delta.worker,
            cached_tokens=delta.cached_tokens,
        )

    def _until_stop(self, tokens: Sequence[SampledToken], text: list[str]) -> tuple[SampledToken, ...]:
        """Those that count; adds their text."""
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
        # Text of the first `min_tokens` tokens stops nothing, nor does it begin a stop string.
        return text if early or not self.has_stops else self._matcher.feed(text)


class ResumeFilter:
    """What a client still lacks of one choice: the whole of a continued stream comes again, from its first token."""

    def __init__(self, has: ChoicePosition) -> None:
        self._num_tokens = has.num_tokens
        self._num_chars = has.num_chars

    def unseen(self, delta: TextDelta) -> TextDelta:
        """The part that is new. A finish comes again, because usage needs it."""
        if not self._num_tokens and not self._num_chars:
            return delta
        tokens = min(self._num_tokens, len(delta.tokens))
        chars = min(self._num_chars, len(delta.text))
        self._num_tokens -= tokens
        self._num_chars -= chars
        return delta._replace(
            tokens=delta.tokens[tokens:],
            text=delta.text[chars:],
            passed=delta.tokens[:tokens],
            passed_text=delta.text[:chars],
        )


class TextCollector:
    """A `TextSink` that puts a call's answer together."""

    def __init__(self) -> None:
        self._parts: dict[int, list[TextDelta]] = {}
        self.readings: dict[int, ScoredPrompt] = {}
        """Of prompts, by the index of the first choice of each."""

    async def ready(self) -> None:
        """There is always room."""

    def on_delta(self, delta: TextDelta) -> bool:
        if delta.reading is not None:
            self.readings[delta.choice_index] = delta.reading
            return False
        self._parts.setdefault(delta.choice_index, []).append(delta)
        return False

    def choices(self) -> list[TextDelta]:
        """One delta per choice that holds its whole answer, in order of the choices."""
        return [parts[0] if len(parts) == 1 else _joined(parts) for _, parts in sorted(self._parts.items())]


def _joined(parts: Sequence[TextDelta]) -> TextDelta:
    return parts[-1]._replace(
        text="".join(part.text for part in parts), tokens=tuple(token for part in parts for token in part.tokens)
    )
