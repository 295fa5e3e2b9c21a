"""From dispatch's tokens to a client's text: detokenize, look for stop strings, count, measure.

`ChoiceText` is one choice, `RequestText` all of one request, both without I/O. `read_text` gives the answers of one
client call to a `TextReader`, in whatever turn brings their tokens. Cancelling it cancels the requests.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from router.asked import Prepared
from router.reading import PromptReading
from router.request_meter import RequestMeter
from router.requests import ChoiceDelta, ChoiceFinish, Generator
from router.stop_strings import StopMatcher
from router.stream_ids import ChoicePosition
from router.tokenizer import Tokenizer
from tandem.errors import InternalError, ServingError
from tandem.ids import Incarnation
from tandem.outputs import FinishReason, SampledToken

_HELD_TOKENS = 256
"""Of a choice that nobody reads along with: its text is made of so many at a time, which takes a millisecond or two."""


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
    reading: PromptReading | None = None
    """Of the prompt whose first choice this is, before its tokens."""
    cached_tokens: int | None = None
    """See ChoiceDelta."""


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(self, index: int, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._index = index
        self._prepared = prepared
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
            if not self._prepared.include_stop:
                return ""
        text = self._words.push(token_id)
        # Text of the first `min_tokens` tokens stops nothing, nor does it begin a stop string.
        return text if early or not self.has_stops else self._matcher.feed(text)


class Remainder:
    """What a client still lacks of one choice: the whole of a continued stream comes again, from its first token."""

    def __init__(self, has: ChoicePosition) -> None:
        self._num_tokens = has.num_tokens
        self._num_chars = has.num_chars

    def of(self, delta: TextDelta) -> TextDelta:
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


class RequestText:
    """The text of all choices of one request, measured."""

    def __init__(
        self,
        generator: Generator,
        prepared: Prepared,
        tokenizer: Tokenizer,
        meter: RequestMeter,
        first_index: int = 0,
    ) -> None:
        """`first_index`: of the first choice, over all prompts of the client's call."""
        request = prepared.request
        self._generator = generator
        self._request_id = request.request_id
        self._first_index = first_index
        self._choices = [ChoiceText(first_index + i, prepared, tokenizer) for i in range(request.num_choices)]
        self._remainders = [Remainder(has) for has in prepared.has]
        self._meter = meter

    def feed(self, delta: ChoiceDelta, *, num_measured: int = 0) -> TextDelta | None:
        """What dispatch's delta means to the client; None when nothing. Raises InternalError.

        `num_measured`: leading tokens that were measured when they came.
        """
        index = delta.choice_index
        if delta.reading is not None:
            return TextDelta(self._first_index, reading=delta.reading)
        choice = self._choices[index]
        was_stopped = choice.has_stops and choice.stopped
        shown = choice.feed(delta)
        if shown is None:
            return None
        if self._remainders:
            shown = self._remainders[index].of(shown)
        self._meter.tokens(index, len(shown.tokens) - num_measured)
        if shown.finish is not None:
            self._meter.choice_finished(index, shown.finish)
        elif choice.has_stops and choice.stopped and not was_stopped:
            self._generator.finish_choice(self._request_id, index)
        return shown

    def end(self) -> None:
        """Dispatch has nothing more. Raises InternalError when a choice has not ended."""
        if not all(choice.finished for choice in self._choices):
            raise InternalError("the answer ended before its last choice did")
        self._meter.succeeded()


class TextReader(Protocol):
    """Takes a client call's text where it arrives; see `router.requests.Reader`."""

    def take(self, delta: TextDelta) -> bool:
        """The next delta; whether nothing more should come before `ready`."""
        ...

    async def ready(self) -> None:
        """Return when there is room again. Raises what ends the call."""
        ...


class _AlongReader:
    """A `Reader` that shows each delta's text at once."""

    def __init__(self, text: RequestText, show: TextReader, meter: RequestMeter | None = None) -> None:
        """`meter`: hears when the first tokens were shown."""
        self._feed = text.feed
        self._show = show.take
        self._unshown = meter
        self.ready = show.ready

    def take(self, delta: ChoiceDelta) -> bool:
        shown = self._feed(delta)
        if shown is None:
            return False
        is_enough = self._show(shown)
        if self._unshown is not None and shown.tokens:
            self._unshown.first_shown()
            self._unshown = None
        return is_enough


class _EndReader:
    """A `Reader` that nobody reads along with, of a request whose text ends no choice: many tokens at a time."""

    def __init__(self, text: RequestText, meter: RequestMeter, show: TextReader, num_choices: int) -> None:
        self._text = text
        self._meter = meter
        self._show = show
        self._held: list[list[SampledToken]] = [[] for _ in range(num_choices)]

    async def ready(self) -> None:
        """There is always room: an answer is bounded by `max_tokens`."""

    def take(self, delta: ChoiceDelta) -> bool:
        if delta.reading is not None:
            return _AlongReader(self._text, self._show).take(delta)
        index, held = delta.choice_index, self._held[delta.choice_index]
        whole = delta._replace(tokens=(*held, *delta.tokens)) if held else delta
        if delta.finish is None:
            self._meter.tokens(index, len(delta.tokens))
            if len(whole.tokens) < _HELD_TOKENS:
                held += delta.tokens
                return False
        measured = len(held) if delta.finish is not None else len(whole.tokens)
        held.clear()
        shown = self._text.feed(whole, num_measured=measured)
        return shown is not None and self._show.take(shown)


async def read_text(
    generator: Generator,
    prepared: Sequence[Prepared],
    tokenizer: Tokenizer,
    new_meter: Callable[[Prepared], RequestMeter],
    show: TextReader,
) -> None:
    """Show the answers to the requests of one client call. The first error ends all of them.

    Each as it comes if its request `reads_along`, else each choice in large parts.
    """
    firsts = accumulate((one.request.num_choices for one in prepared), initial=0)
    showings = [_Showing(one, first, show) for one, first in zip(prepared, firsts, strict=False)]
    if len(showings) == 1:
        await _read(generator, tokenizer, new_meter(prepared[0]), showings[0])
        return
    with ExitStack() as stack:
        refusal: ServingError | None = None
        try:
            stack.enter_context(generator.admitted([one.request for one in prepared]))
        except ServingError as error:
            refusal = error
        tasks = [
            asyncio.create_task(_read(generator, tokenizer, new_meter(showing.prepared), showing, refusal))
            for showing in showings
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Showing(NamedTuple):
    """One request of a call, and how it is shown."""

    prepared: Prepared
    first_index: int
    show: TextReader


async def _read(
    generator: Generator,
    tokenizer: Tokenizer,
    meter: RequestMeter,
    showing: _Showing,
    refusal: ServingError | None = None,
) -> None:
    """`refusal`: of the whole call, which each of its requests counts."""
    request, show = showing.prepared.request, showing.show
    text = RequestText(generator, showing.prepared, tokenizer, meter, showing.first_index)
    reader = (
        _AlongReader(text, show, meter) if request.reads_along else _EndReader(text, meter, show, request.num_choices)
    )
    with meter:
        if refusal is not None:
            raise refusal
        await generator.run(request, reader)
        text.end()


class WholeText:
    """A `TextReader` that puts a call's answer together."""

    def __init__(self) -> None:
        self._parts: dict[int, list[TextDelta]] = {}
        self.readings: dict[int, PromptReading] = {}
        """Of prompts, by the index of the first choice of each."""

    async def ready(self) -> None:
        """There is always room."""

    def take(self, delta: TextDelta) -> bool:
        """See TextReader."""
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
