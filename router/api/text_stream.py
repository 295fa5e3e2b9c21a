"""Turns dispatch's tokens into a client's text: detokenizes, finds stop strings, counts, measures.

`RequestText` is dispatch's sink: it turns deltas into text and passes them on synchronously to the `TextSink` that
writes them. `read_text` runs the requests of one client call. Cancelling it cancels them.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate

from msgspec.structs import replace

from router.api.answer.choice_text import ChoiceText, ResumeFilter, TextDelta, TextSink
from router.api.request.client_request import PreparedRequest
from router.api.request_meter import RequestMeter
from router.text.tokenizer import Tokenizer
from router.types.requests import ChoiceDelta, Generator, PlainStream
from tandem.errors import InternalError, ServingError
from tandem.values.outputs import SampledToken, bare_token

_HELD_TOKENS = 256
"""Tokens detokenized at a time when the answer is not streamed, which takes a millisecond or two."""


class RequestText:
    """The `DeltaSink` of one request: detokenizes, measures and forwards the text of all its choices.

    Where the answer is not streamed and has no stop strings, many tokens are detokenized at a time.
    """

    def __init__(
        self,
        generator: Generator,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        meter: RequestMeter,
        sink: TextSink,
        first_index: int = 0,
    ) -> None:
        """`first_index`: index of its first choice among those of all prompts in the client's call."""
        request = prepared.request
        self._generator = generator
        self._request_id = request.request_id
        self._first_index = first_index
        self._choices = [ChoiceText(first_index + i, prepared, tokenizer) for i in range(request.num_choices)]
        self._remainders = [ResumeFilter(has) for has in prepared.has] if prepared.has else []
        self._meter = meter
        self._sink = sink
        self._tokenizer = tokenizer
        self._show = sink.on_delta
        self._show_text = sink.on_text
        self._is_shown = False
        self._held: list[list[SampledToken]] | None = None
        self.ready = sink.ready
        if not request.reads_along:
            # There is always room: an answer is bounded by `max_tokens`.
            self._held = [[] for _ in range(request.num_choices)]
            self.ready = _at_once

    def on_delta(self, delta: ChoiceDelta) -> bool:
        """Handle a delta, see DeltaSink. Raises InternalError."""
        if self._held is not None and delta.scored is None:
            return self._hold(delta, self._held[delta.choice_index])
        shown = self._feed(delta)
        if shown is None:
            return False
        is_enough = self._show(shown)
        if not self._is_shown and shown.tokens:
            self._is_shown = True
            self._meter.first_shown()
        return is_enough

    def on_token(self, choice_index: int, token_id: int) -> bool:
        """Handle a token that comes with nothing else, see DeltaSink. Raises InternalError."""
        text = None
        if self._held is None and not self._remainders:
            text = self._choices[choice_index].push(token_id)
        if text is None:
            return self.on_delta(ChoiceDelta(choice_index, (bare_token(token_id),)))
        self._meter.token(choice_index)
        return self._show_text(self._first_index + choice_index, token_id, text)

    def plain_stream(self, choice_index: int) -> PlainStream | None:
        """Return how the next tokens of a choice can be written without this, see DeltaSink."""
        last_s = self._meter.last_s(choice_index)
        if self._held is not None or self._remainders or last_s is None:
            return None
        stop_ids, texts = self._choices[choice_index].plain_stop_ids, self._tokenizer.json_texts
        if (
            stop_ids is None
            or texts is None
            or (events := self._sink.plain_events(self._first_index + choice_index)) is None
        ):
            return None
        return PlainStream(events, texts, stop_ids, last_s)

    def on_written(self, choice_index: int, gaps_s: Sequence[float]) -> None:
        self._choices[choice_index].on_written(len(gaps_s))
        self._meter.written(choice_index, gaps_s)
        self._sink.on_written(len(gaps_s))

    def _hold(self, delta: ChoiceDelta, held: list[SampledToken]) -> bool:
        whole = replace(delta, tokens=(*held, *delta.tokens)) if held else delta
        if delta.finish is None:
            self._meter.tokens(delta.choice_index, len(delta.tokens))
            if len(whole.tokens) < _HELD_TOKENS:
                held += delta.tokens
                return False
        measured = len(held) if delta.finish is not None else len(whole.tokens)
        held.clear()
        shown = self._feed(whole, num_measured=measured)
        return shown is not None and self._show(shown)

    def _feed(self, delta: ChoiceDelta, *, num_measured: int = 0) -> TextDelta | None:
        """Turn dispatch's delta into the client's; None when there is nothing to show. Raises InternalError.

        `num_measured`: leading tokens that were measured on arrival.
        """
        index = delta.choice_index
        if delta.scored is not None:
            return TextDelta(self._first_index, scored=delta.scored)
        choice = self._choices[index]
        was_stopped = choice.has_stops and choice.stopped
        shown = choice.feed(delta)
        if shown is None:
            return None
        if self._remainders:
            shown = self._remainders[index].unseen(shown)
        self._meter.tokens(index, len(shown.tokens) - num_measured)
        if shown.finish is not None:
            self._meter.choice_finished(index, shown.finish)
        elif choice.has_stops and choice.stopped and not was_stopped:
            self._generator.finish_choice(self._request_id, index)
        return shown

    def end(self) -> None:
        """Finish the measurements. Raises InternalError when a choice has not ended."""
        for choice in self._choices:
            if not choice.finished:
                raise InternalError("the answer ended before its last choice did")
        self._meter.succeeded()


async def _at_once() -> None:
    pass


async def read_text(
    generator: Generator,
    prepared: Sequence[PreparedRequest],
    tokenizer: Tokenizer,
    new_meter: Callable[[PreparedRequest], RequestMeter],
    sink: TextSink,
) -> None:
    """Write the answers to the requests of one client call to `sink`. The first error ends all of them.

    Text is delivered token by token if the request `reads_along`, else each choice in large parts.
    """
    if len(prepared) == 1:
        await _read(generator, tokenizer, new_meter(prepared[0]), prepared[0], sink)
        return
    firsts = accumulate((one.request.num_choices for one in prepared), initial=0)
    with ExitStack() as stack:
        refusal: ServingError | None = None
        try:
            stack.enter_context(generator.admitted([one.request for one in prepared]))
        except ServingError as error:
            refusal = error
        tasks = [
            asyncio.create_task(_read(generator, tokenizer, new_meter(one), one, sink, first, refusal))
            for one, first in zip(prepared, firsts, strict=False)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _read(
    generator: Generator,
    tokenizer: Tokenizer,
    meter: RequestMeter,
    prepared: PreparedRequest,
    sink: TextSink,
    first_index: int = 0,
    refusal: ServingError | None = None,
) -> None:
    """Read one request of a call. `refusal`: the error of the whole call, counted for each of its requests."""
    text = RequestText(generator, prepared, tokenizer, meter, sink, first_index)
    with meter:
        if refusal is not None:
            raise refusal
        await generator.run(prepared.request, text)
        text.end()
