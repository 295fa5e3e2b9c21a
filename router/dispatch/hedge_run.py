"""Second attempts at choices whose first token is late: a twin on another worker, until one of the two has a token.

The twin is a run of the same choice under the same id, with no tokens yet, so whichever produces one first simply
becomes the choice. A twin is never retried; when the first run fails, its twin takes its place.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.dispatch.choices.choice_run import ChoiceRun
from router.dispatch.choices.context import DispatchContext
from router.dispatch.choices.hedging import Hedging
from router.dispatch.mailbox import FromWorker, HedgeDue, Mailbox
from router.types.requests import ChoiceDelta
from router.types.session_events import TokensArrived, TransferFailed, WorkerLost
from tandem.errors import ServingError

NewRun = Callable[[int], ChoiceRun]
"""Makes another run of a choice, whose messages are marked as the twin's."""
_ATTEMPTS_APART = 1 << 12
"""Distance between the numbers of a choice's attempts and its twin's: hand-offs are named after them."""


class HedgeRun:
    """The twins of one request's choices."""

    def __init__(self, hedging: Hedging, context: DispatchContext, choices: list[ChoiceRun]) -> None:
        """`choices`: the request's; a twin that wins replaces its choice there."""
        self._hedging = hedging
        self._context = context
        self._choices = choices
        self._twins: dict[int, ChoiceRun] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._started_s: dict[int, float] = {}

    def start(self, mailbox: Mailbox) -> None:
        """Start the hedging timers: the choices were just sent."""
        hedging = self._hedging
        delay_s, loop, now_s = hedging.delay_s, asyncio.get_running_loop(), self._context.clock()
        for index in range(len(self._choices)):
            hedging.earn()
            self._started_s[index] = now_s
            if delay_s is not None:
                due = HedgeDue(choice_index=index)
                self._timers.append(loop.call_later(delay_s, mailbox.post, due))

    def due(self, index: int, new: NewRun) -> None:
        """Begin a second attempt at a choice whose first token is late, if the budget and the workers allow it."""
        first, hedging = self._choices[index], self._hedging
        if first.done or first.token_ids or first.worker is None or not hedging.may_begin:
            return
        twin = new(index)
        try:
            twin.submit_hedge(first, apart=_ATTEMPTS_APART)
        except ServingError:
            return
        if twin.worker is None:
            twin.abandon()
        else:
            hedging.began()
            self._twins[index] = twin

    def on_event(self, message: FromWorker) -> Sequence[ChoiceDelta]:
        """Handle an event of either run. Raises what the choice raises."""
        hedging, index, event = self._hedging, message.choice_index, message.event
        has_tokens = isinstance(event, TokensArrived) and bool(event.tokens)
        if has_tokens and (started_s := self._started_s.pop(index, None)) is not None:
            hedging.observe(self._context.clock() - started_s)
        twin, first = self._twins.get(index), self._choices[index]
        if twin is not None and has_tokens:
            # The winner is already known.
            if not message.is_twin:
                self.drop(index)
            elif twin.runs(message.attempt):
                hedging.won()
                self._replace(index)
            return (twin if message.is_twin else first).on_event(message.attempt, event)
        if twin is None or isinstance(event, TransferFailed):
            # A twin that has won keeps sending its events as the twin's.
            return (twin if message.is_twin and twin is not None else first).on_event(message.attempt, event)
        ended = twin if message.is_twin else first
        if not ended.runs(message.attempt):
            return []
        if isinstance(event, WorkerLost):
            ended.report_worker_lost()
        if message.is_twin:
            self.drop(index)
        else:
            self._replace(index)
        return []

    def drop(self, index: int) -> None:
        """Cancel the twin of a choice, if there is one."""
        if (twin := self._twins.pop(index, None)) is not None:
            twin.abandon()

    def close(self) -> None:
        """Cancel all timers and twins."""
        for timer in self._timers:
            timer.cancel()
        for index in tuple(self._twins):
            self.drop(index)

    def _replace(self, index: int) -> None:
        self._choices[index].abandon()
        self._choices[index] = self._twins.pop(index)
