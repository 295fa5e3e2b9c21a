"""From dispatch's tokens to a client's text: detokenize, look for stop strings, count, measure.

`ChoiceText` is one choice, without I/O. `stream_text` runs all choices of one request; `stream_all` those of
several requests side by side, with bounded queues. Closing either stream closes dispatch's, which cancels the request.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from router.frontend import Prepared
from router.metrics import RequestMeter
from router.requests import ChoiceDelta, ChoiceFinish, Generator
from router.stop_strings import StopMatcher
from router.stream_ids import ChoicePosition
from router.tokenizer import Tokenizer
from tandem.errors import InternalError
from tandem.ids import Incarnation
from tandem.outputs import FinishReason, SampledToken

_MERGE_QUEUE = 16  # deltas of several prompts waiting for one slow reader; beyond it dispatch's own bound counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one choice, the tokens counted with it, its end, or all three."""

    choice_index: int
    """Over all prompts of the client's call: prompt number times `n` plus the choice."""
    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish: ChoiceFinish | None = None
    stopped_by: str | int | None = None
    """With `finish`: the stop string or stop token that ended the choice."""
    worker: Incarnation = Incarnation(0)  # noqa: RUF009  # an int
    """The decode worker's process that it came from."""
    passed: tuple[SampledToken, ...] = ()
    """Of a stream that is continued: tokens before these that the client has."""


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(self, index: int, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._index = index
        self._prepared = prepared
        self._words = tokenizer.detokenizer(skip_special_tokens=prepared.skip_special_tokens)
        self._matcher = StopMatcher(prepared.stops, include_match=prepared.include_stop)
        self._stop_token: int | None = None
        self._num_tokens = 0
        self.finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was seen; tokens that still arrive are not part of the answer."""
        return self._matcher.match is not None

    def feed(self, delta: ChoiceDelta) -> TextDelta | None:
        """What dispatch's delta means to the client; None when nothing."""
        text: list[str] = []
        counted: list[SampledToken] = []
        for token in delta.tokens:
            if self.stopped or self.finished:
                break
            counted.append(token)
            text.append(self._push(token.token_id))
        finish = delta.finish
        if finish is not None:
            self.finished = True
            if finish.reason is FinishReason.ERROR:
                raise InternalError("generation failed")
            if not self.stopped:
                text += [self._matcher.feed(self._words.flush()), self._matcher.flush()]
            if self.stopped:
                # The worker may have met another end between the match and our word to it.
                finish = ChoiceFinish(reason=FinishReason.STOP, cached_tokens=finish.cached_tokens, times=finish.times)
        if not counted and finish is None:
            return None
        return TextDelta(
            choice_index=self._index,
            text="".join(text),
            tokens=tuple(counted),
            finish=finish,
            stopped_by=(self._matcher.match or self._stop_token) if finish else None,
            worker=delta.worker,
        )

    def _push(self, token_id: int) -> str:
        self._num_tokens += 1
        early = self._num_tokens <= self._prepared.request.sampling.min_tokens
        if token_id in self._prepared.stop_token_ids and not early:
            self._stop_token = token_id
            if not self._prepared.include_stop:
                return ""
        text = self._words.push(token_id)
        # Text of the first `min_tokens` tokens stops nothing, nor does it begin a stop string.
        return text if early else self._matcher.feed(text)


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
        return replace(delta, tokens=delta.tokens[tokens:], text=delta.text[chars:], passed=delta.tokens[:tokens])


async def stream_text(
    generator: Generator,
    prepared: Prepared,
    tokenizer: Tokenizer,
    meter: RequestMeter,
    first_index: int = 0,
) -> AsyncGenerator[TextDelta, None]:
    """All choices of one request, interleaved, until each has finished. Raises what dispatch raises."""
    request = prepared.request
    choices = [ChoiceText(first_index + i, prepared, tokenizer) for i in range(request.num_choices)]
    remainders = [Remainder(has) for has in prepared.has]
    with meter:
        async with aclosing(generator.generate(request)) as deltas:
            async for delta in deltas:
                choice = choices[delta.choice_index]
                was_stopped = choice.stopped
                shown = choice.feed(delta)
                if shown is None:
                    continue
                if remainders:
                    shown = remainders[delta.choice_index].of(shown)
                meter.tokens(delta.choice_index, len(shown.tokens))
                if shown.finish is not None:
                    meter.choice_finished(delta.choice_index, shown.finish)
                elif choice.stopped and not was_stopped:
                    generator.finish_choice(request.request_id, delta.choice_index)
                yield shown
        if not all(choice.finished for choice in choices):
            raise InternalError("the answer ended before its last choice did")
        meter.succeeded()


async def stream_all(
    generator: Generator,
    prepared: Sequence[Prepared],
    tokenizer: Tokenizer,
    new_meter: Callable[[Prepared], RequestMeter],
) -> AsyncGenerator[TextDelta, None]:
    """The answers of several requests of one client call, as they come. The first error ends all of them."""
    starts = [0]
    for one in prepared:
        starts.append(starts[-1] + one.request.num_choices)
    streams = [
        stream_text(generator, one, tokenizer, new_meter(one), start)
        for one, start in zip(prepared, starts, strict=False)
    ]
    merged = streams[0] if len(streams) == 1 else _merge(streams)
    async with aclosing(merged) as deltas:
        async for delta in deltas:
            yield delta


async def _merge(streams: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """One task per stream, so that each is read and closed by a single task."""
    room = asyncio.Semaphore(_MERGE_QUEUE)
    arrived: asyncio.Queue[TextDelta | asyncio.Task[None]] = asyncio.Queue()  # bounded by `room`, and one end per task

    async def pump(stream: AsyncGenerator[TextDelta, None]) -> None:
        async with aclosing(stream):
            async for delta in stream:
                await room.acquire()
                arrived.put_nowait(delta)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await arrived.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what ended it, if anything did
                open_streams -= 1
            else:
                room.release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(deltas: AsyncIterator[TextDelta]) -> list[TextDelta]:
    """One delta per choice that holds its whole answer, in order of the choices."""
    whole: dict[int, list[TextDelta]] = {}
    async for delta in deltas:
        whole.setdefault(delta.choice_index, []).append(delta)
    return [
        TextDelta(
            choice_index=index,
            text="".join(part.text for part in parts),
            tokens=tuple(token for part in parts for token in part.tokens),
            finish=parts[-1].finish,
            stopped_by=parts[-1].stopped_by,
        )
        for index, parts in sorted(whole.items())
    ]
