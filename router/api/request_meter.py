"""Measures one request: what a server counts as its tokens come, and when it ends."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from router.access.audit_log import current_entry
from router.metrics.ended_requests import EndedRequest
from router.metrics.latency_slices import FirstTokens, RequestTraits
from router.metrics.router_metrics import RouterMetrics
from router.tenants.prices import Spent
from router.types.requests import ChoiceFinish, RoutedRequest
from tandem.errors import Code, InvariantError, ServingError
from tandem.telemetry.tracing import Span


class RequestMeter:
    """The measurements of one request; a context manager around its stream."""

    def __init__(
        self,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        prompt_tokens: int,
        choices: int,
        span: Span | None = None,
        traits: RequestTraits | None = None,
        arrived_s: float | None = None,
    ) -> None:
        """`span`: the request's; ends with it. `traits`: its metric labels. `arrived_s`: None: now."""
        self._metrics = metrics
        self._traits = traits or RequestTraits(prompt_tokens=prompt_tokens)
        self._span = span
        self._finishes: list[ChoiceFinish] = []
        self._sizes: list[int] = []
        """Tokens of each choice in `_finishes`."""
        self._clock = clock
        self._prompt_tokens = prompt_tokens
        self._prepared_s = clock()
        self._start = self._prepared_s if arrived_s is None else arrived_s
        self._first_s: float | None = None
        self._second_s: float | None = None
        self._shown_s: float | None = None
        self._last: list[float | None] = [None] * choices
        self._counts = [0] * choices

    @classmethod
    def for_request(cls, request: RoutedRequest, metrics: RouterMetrics, clock: Callable[[], float]) -> Self:
        """Make the meter of one request of a client."""
        return cls(
            metrics,
            clock,
            prompt_tokens=len(request.prompt_token_ids),
            choices=request.num_choices,
            span=request.span,
            traits=RequestTraits.from_request(request),
            arrived_s=request.arrived_s,
        )

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._start

    def __enter__(self) -> Self:
        self._metrics.opened(self)
        metrics = self._metrics
        metrics.waiting.value += 1
        metrics.prompt_tokens.value += self._prompt_tokens
        metrics.prompt_size.observe(self._prompt_tokens)
        metrics.max_tokens.observe(self._traits.max_tokens)
        metrics.num_choices.observe(len(self._counts))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self._metrics.waiting if self._first_s is None else self._metrics.running).value -= 1
        self._metrics.closed(self)
        if (entry := current_entry()) is not None:
            entry.prompt_tokens += self._prompt_tokens
            entry.completion_tokens += sum(self._counts)
        code = _code_of(error)
        if code is not None:
            self._metrics.failed(code)
        if self._first_s is not None or self._finishes:
            self._metrics.usage.add(self._traits.tenant, self._spent())
        self._metrics.ended.add(self._ended(code))
        if self._span is not None:
            self._end_span(self._span, code)

    def tokens(self, choice: int, count: int) -> None:
        """Count `count` tokens of one choice that arrived together."""
        if count == 0:
            return
        now = self._clock()
        if self._first_s is None:
            self._first_s = now
            self._metrics.waiting.value -= 1
            self._metrics.running.value += 1
            self._metrics.ttft.observe(now - self._start)
            if self._span is not None:
                self._span.event("first_token", now)
        if (last := self._last[choice]) is not None:
            self._metrics.itl.observe_many((now - last) / count, count)
            if self._second_s is None:
                self._second_s = now
        self._last[choice] = now
        self._counts[choice] += count
        self._metrics.generation_tokens.value += count

    def token(self, choice: int) -> None:
        """Count a token that arrived alone: `tokens`, for less."""
        if (last := self._last[choice]) is None or self._second_s is None:
            self.tokens(choice, 1)
            return
        self._last[choice] = now = self._clock()
        self._metrics.itl.observe(now - last)
        self._counts[choice] += 1
        self._metrics.generation_tokens.value += 1

    def last_s(self, choice: int) -> float | None:
        """When the choice's last token arrived; None while its next one needs `tokens`."""
        return None if self._second_s is None else self._last[choice]

    def written(self, choice: int, gaps_s: Sequence[float]) -> None:
        """Count tokens that native code wrote as `token` does, each so many seconds after the one before."""
        last_s = self._last[choice]
        if last_s is None:
            raise InvariantError("tokens were written before the first one was measured")
        self._last[choice] = last_s + sum(gaps_s)
        self._metrics.itl.pending.extend(gaps_s)
        self._counts[choice] += len(gaps_s)
        self._metrics.generation_tokens.value += len(gaps_s)
        self._metrics.writers.num_native += len(gaps_s)

    def first_shown(self) -> None:
        """Record that the text of the first tokens was handed to the server that writes it."""
        self._shown_s = self._clock()

    def choice_finished(self, choice: int, finish: ChoiceFinish) -> None:
        """Count an ended choice."""
        metrics = self._metrics
        self._finishes.append(finish)
        self._sizes.append(self._counts[choice])
        metrics.succeeded(finish.reason.value)
        metrics.prefix_queries.value += self._prompt_tokens
        metrics.prefix_hits.value += finish.cached_tokens

    def succeeded(self) -> None:
        """Observe the duration of a request whose choices have all ended."""
        self._metrics.e2e.observe(self._clock() - self._start)

    def _ended(self, code: Code | None) -> EndedRequest:
        """Return the request as a whole, however it ended."""
        times = None
        if self._first_s is not None:
            times = FirstTokens(
                arrived_s=self._start,
                prepared_s=self._prepared_s,
                first_s=self._first_s,
                second_s=self._second_s,
                shown_s=self._shown_s,
                last_s=max([last for last in self._last if last is not None]),
            )
        return EndedRequest(
            traits=self._traits,
            times=times,
            finishes=self._finishes,
            sizes=self._sizes,
            num_tokens=max(self._counts),
            code=code,
            seconds=self.age_s,
        )

    def _spent(self) -> Spent:
        """Return the usage by ended choices; of the others only the tokens are known."""
        whole = Spent(
            requests=1,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._least_cached(),
            completion_tokens=sum(self._counts),
        )
        for finish in self._finishes:
            whole = whole.with_choice(
                finish.times, computed_tokens=finish.computed_tokens, needed_tokens=finish.needed_tokens
            )
        return whole

    def _least_cached(self) -> int:
        return min([finish.cached_tokens for finish in self._finishes], default=0)

    def _end_span(self, span: Span, code: Code | None) -> None:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": self._prompt_tokens,
                "gen_ai.usage.output_tokens": sum(self._counts),
                "gen_ai.usage.cache_read.input_tokens": self._least_cached(),
                "gen_ai.response.finish_reasons": tuple(finish.reason.value for finish in self._finishes),
            }
        )
        if code is not None:
            span.set_attributes({"error.type": code.value})
            span.fail(code.value)
        span.end(self._clock())


def _code_of(error: BaseException | None) -> Code | None:
    if isinstance(error, ServingError):
        return error.code
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Code.CANCELLED
    return None if error is None else Code.INTERNAL
