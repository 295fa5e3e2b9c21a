"""Runs one client request.

Everything that happens to it arrives in one mailbox and is handled in order by the task that awaits `step`;
`ChoiceProgress` and `Placer` decide what to do. Orders to workers never wait, so the whole request is one coroutine.

Tokens alone take a shortcut when a `DeltaSink` follows the request: if no message waits before them and the sink has
room, the session delivers them directly, without waking the coroutine.
"""

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial

from router.dispatch.choices.choice_run import ChoiceRun
from router.dispatch.choices.context import DispatchContext, NewReader, Waiting
from router.dispatch.choices.health_reports import ChoiceHealthReporter
from router.dispatch.choices.waiting_choices import WaitingPosition
from router.dispatch.hedge_run import HedgeRun
from router.dispatch.mailbox import (
    DeadlinePassed,
    FromWorker,
    HedgeDue,
    Mailbox,
    Message,
    Overflowed,
    Recheck,
    RejoinOver,
    RoomAvailable,
    StopChoice,
    Superseded,
    WorkersChanged,
)
from router.types.requests import ChoiceDelta, DeltaSink, PlainStream, RoutedRequest, TokenAccount
from router.types.session_events import AttemptEvent, AttemptReader, StreamOffer, TokensArrived
from tandem.errors import DeadlineExceeded, Overloaded, ServingError, StreamTaken, Unavailable
from tandem.values.ids import BlockHash
from tandem.values.outputs import FinishReason, bare_token

_TOKENS_BETWEEN_OFFERS = 8
"""Tokens after one that could not be followed by tokens written natively, until the next try."""


class RequestRun:
    """Drives all choices of one request to their end."""

    def __init__(self, request: RoutedRequest, context: DispatchContext, account: TokenAccount | None = None) -> None:
        """`account`: counts what the client is about to receive."""
        self.request_id = request.request_id
        self.request = request
        self._context = context
        self._account = account or _UNCOUNTED
        # A continued stream begins with everything that its client has.
        shown = sum(point.num_tokens for point in request.resume) if request.resume else 0
        self._mailbox = Mailbox(max_tokens=context.settings.stream_buffer_tokens * request.num_choices + shown)
        self._deadline: asyncio.TimerHandle | None = None
        self._rejoin: asyncio.TimerHandle | None = None
        self._sink: DeltaSink | None = None
        self._sink_is_full = False
        self._sink_error: Exception | None = None
        self._has_waited = False
        self._offers_from = 0
        self._queued: dict[int, WaitingPosition] = {}
        self._patience: dict[int, asyncio.TimerHandle] = {}
        self._names: list[BlockHash] = []
        # As the hasher and sessions need it: turned into numbers of four bytes once.
        self._prompt = array("i", request.prompt_token_ids)
        context.hasher.extend(request.hash_root, self._names, self._prompt)
        self._health_reports = [
            ChoiceHealthReporter(index, request, context.health, context.placer.registry)
            for index in range(request.num_choices)
        ]
        self._choices: list[ChoiceRun] = []
        self._hedges: HedgeRun | None = None

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        for choice in self._choices:  # noqa: SIM110  # asked at each step: no generator
            if not choice.done:
                return False
        return True

    @property
    def is_whole_answer(self) -> bool:
        """Whether a client's answer began with this run, so that its choices have all of their tokens."""
        return self.request.only_worker is None and not self.request.resume

    @property
    def first_answer(self) -> Sequence[int]:
        """The tokens of the first choice, until it is closed."""
        return self._choices[0].token_ids

    @property
    def was_taken(self) -> bool:
        """Whether a worker accepted any choice, or may have; final once closed."""
        for report in self._health_reports:  # noqa: SIM110  # asked for each request: no generator
            if report.was_taken:
                return True
        return False

    @property
    def adopted(self) -> frozenset[int]:
        """Choices that continued on a worker that still had them; the others are generated from the beginning."""
        return frozenset(report.index for report in self._health_reports if report.was_adopted)

    def start(self) -> None:
        """Send every choice to a worker. Raises the errors of Generator."""
        if self.request.deadline_s is not None:
            remaining_s = self.request.deadline_s - self._context.clock()
            self._deadline = self._post_later(max(0.0, remaining_s), DeadlinePassed())
        for report in self._health_reports:
            self._choices.append(self._new_choice(report, self._reader))
        for choice in self._choices:
            choice.submit()
        hedging, once = self._context.hedging, self.request.only_worker is not None or bool(self.request.resume)
        if hedging is not None and not once:
            self._hedges = HedgeRun(hedging, self._context, self._choices)
            self._hedges.start(self._mailbox)
        self._wait_where_due()

    async def step(self) -> Sequence[ChoiceDelta]:
        """Wait for the next event; return its deltas for the client, counted. Raises the errors of Generator."""
        for choice in self._choices:
            if choice.failure is not None:
                raise choice.failure
        await self._mailbox.arrival()
        if self._sink_is_full:
            await self._sink_ready()
        deltas = self._handle(self._mailbox.next_message())
        self._wait_where_due()
        for delta in deltas:
            self._account.on_delta(delta)
        return deltas

    async def follow(self, sink: DeltaSink) -> None:
        """Run all steps until the end, into a sink. Raises the errors of Generator, and the sink's."""
        self._sink = sink
        while not self.done:
            for delta in await self.step():
                self._sink_is_full |= sink.on_delta(delta)
            if self._sink_error is not None:
                raise self._sink_error
            if self._sink_is_full:
                await self._sink_ready()

    async def _sink_ready(self) -> None:
        """Return when the sink has room, or when there is an urgent message."""
        if self._sink is not None:
            await self._mailbox.wait_unless_urgent(self._sink.ready())
        self._sink_is_full = False

    def stop_choice(self, index: int) -> None:
        """End one choice at once; its finish comes with the next deltas. No-op for one that has ended."""
        choice = self._choices[index]
        if not choice.done:
            if self._hedges is not None:
                self._hedges.drop(index)
            choice.abandon()
            self._mailbox.post(StopChoice(choice_index=index))

    @property
    def resumptions(self) -> int:
        """Number of times that the stream has been continued."""
        return self.request.resumptions

    def supersede(self, *, is_over: bool = False) -> None:
        """Leave the stream to another run, which has begun; `is_over`: no other run exists."""
        if self._hedges is not None:
            self._hedges.close()
        for choice in self._choices:
            if is_over:
                choice.abandon()
            else:
                choice.detach()
        self._mailbox.post(Superseded())

    def close(self) -> None:
        """Cancel whatever still runs on any worker, and forget the request."""
        for timer in (self._deadline, self._rejoin):
            if timer is not None:
                timer.cancel()
        if self._has_waited:
            for index in range(len(self._choices)):
                self._leave_queue(index)
            self._context.placer.registry.unwatch(self._workers_changed)
        self._abandon_all()
        # They refer back to this run. Breaking the cycle here spares a garbage collection, which stalls the event loop.
        self._sink = None
        self._choices.clear()

    def _handle(self, message: Message) -> Sequence[ChoiceDelta]:
        match message:
            case FromWorker():
                return self._on_message(message)
            case HedgeDue() if self._hedges is not None:
                self._hedges.due(message.choice_index, self._twin)
            case StopChoice():
                return self._stopped(self._choices[message.choice_index])
            case WorkersChanged():
                for waiting in self._waiting():
                    waiting.submit()
            case RejoinOver():
                if self._waiting(Waiting.FOR_WORKER):
                    raise self._deserted()
            case RoomAvailable():
                self._leave_queue(message.choice_index)
                self._choices[message.choice_index].retry_full_workers()
            case DeadlinePassed():
                raise DeadlineExceeded("the request's deadline passed")
            case Superseded():
                raise StreamTaken("the client has continued this stream on another connection")
            case Overflowed():
                retry_after_s = self._context.settings.retry_after_s
                raise Overloaded("the client reads too slowly", retry_after_s=retry_after_s)
        return []

    def _on_message(self, message: FromWorker) -> Sequence[ChoiceDelta]:
        if self._hedges is not None:
            return self._hedges.on_event(message)
        return self._choices[message.choice_index].on_event(message.attempt, message.event)

    @staticmethod
    def _stopped(choice: ChoiceRun) -> list[ChoiceDelta]:
        return [] if choice.done else [choice.finish_early(FinishReason.STOP)]

    def _twin(self, index: int) -> ChoiceRun:
        new_reader = partial(self._reader, is_twin=True)
        return self._new_choice(self._health_reports[index], new_reader)

    def _new_choice(self, health: ChoiceHealthReporter, new_reader: NewReader) -> ChoiceRun:
        return ChoiceRun(self.request, health, self._prompt, self._names, self._context, new_reader)

    def _waiting(self, what: Waiting | None = None) -> list[ChoiceRun]:
        return [choice for choice in self._choices if choice.waiting is not None and what in (None, choice.waiting)]

    def _wait_where_due(self) -> None:
        """Begin and end the waits of choices without a worker. Hardly any request has one, or ever had."""
        for choice in self._choices:
            self._has_waited |= choice.waiting is not None
        if self._has_waited:
            self._watch_for_workers()
            self._queue_for_room()

    def _queue_for_room(self) -> None:
        """Wake waiting choices when a worker has room, or when its retry-after time is over."""
        for index, choice in enumerate(self._choices):
            if choice.waiting is not Waiting.FOR_ROOM:
                self._leave_queue(index)
            elif index not in self._patience:
                wake = RoomAvailable(choice_index=index)
                # A choice that is refused again keeps its place in the queue.
                place = self._queued.setdefault(index, self._context.room.new_place(self.request.priority))
                self._context.room.enter(place, choice.num_tokens, partial(self._mailbox.post, wake))
                self._patience[index] = self._post_later(choice.wait_for_room_s(), wake)

    def _leave_queue(self, index: int) -> None:
        if (timer := self._patience.pop(index, None)) is not None:
            timer.cancel()
            self._context.room.leave(self._queued[index])

    @property
    def _was_running(self) -> bool:
        """Whether a choice that waits for a worker already ran on one: such a stream is promised a continuation."""
        return any(choice.was_taken for choice in self._waiting(Waiting.FOR_WORKER))

    def _wait_for_worker_s(self) -> float:
        settings = self._context.settings
        if self._was_running:
            return settings.rejoin_s
        return min(settings.max_queue_s, self._context.placer.registry.worker_due_s())

    def _deserted(self) -> ServingError:
        settings = self._context.settings
        if self._was_running:
            bound = f"within {settings.rejoin_s:g} s (router.rejoin_s)"
            message = f"the decode worker was lost, and none joined to continue {bound}"
        elif self._context.placer.registry.live_decoders():
            # Other workers serve but did not accept it: report the reason they gave.
            return self._waiting(Waiting.FOR_WORKER)[0].final_error()
        else:
            message = "no decode worker accepts requests, and the expected one has not joined"
        return Unavailable(message, retry_after_s=settings.retry_after_s)

    def _watch_for_workers(self) -> None:
        """Watch for workers joining or leaving while a choice waits; bound the wait while no worker is left."""
        registry = self._context.placer.registry
        if self._waiting():
            registry.watch(self._workers_changed)
        else:
            registry.unwatch(self._workers_changed)
        if not self._waiting(Waiting.FOR_WORKER):
            if self._rejoin is not None:
                self._rejoin.cancel()
                self._rejoin = None
        elif self._rejoin is None:
            self._rejoin = self._post_later(self._wait_for_worker_s(), RejoinOver())

    def _reader(self, choice_index: int, attempt: int, *, is_twin: bool = False) -> AttemptReader:
        # By position: for keywords, a `partial` makes a tuple and a dictionary at every call.
        return AttemptReader(
            on_event=partial(self._on_event, choice_index, attempt, is_twin),
            on_token=partial(self._on_token, choice_index, attempt, is_twin),
            offer=partial(self._offer, attempt),
        )

    def _on_event(self, choice_index: int, attempt: int, is_twin: bool, event: AttemptEvent) -> None:
        if (sink := self._open_sink()) is not None and type(event) is TokensArrived:
            self._hand_over(sink, self._choices[choice_index], attempt, event)
            return
        self._mailbox.post(FromWorker(choice_index=choice_index, attempt=attempt, event=event, is_twin=is_twin))
        if self._mailbox.overflowed:
            self._abandon_all()

    def _on_token(self, choice_index: int, attempt: int, is_twin: bool, index: int, token_id: int) -> None:
        """Handle one token as `_on_event` does, but without making objects unless something is in the way."""
        sink = self._open_sink()
        if sink is None or not self._choices[choice_index].accept_token(attempt, index, token_id):
            arrived = TokensArrived(index, (bare_token(token_id),))
            self._on_event(choice_index, attempt, is_twin, arrived)
            return
        try:
            self._account.on_token()
            if not sink.on_token(choice_index, token_id):
                return
            self._sink_is_full = True
        except Exception as error:  # noqa: BLE001  # as in `_hand_over`
            self._sink_failed(error)
        self._mailbox.post(Recheck())

    def _offer(self, attempt: int, next_index: int) -> StreamOffer | None:
        """Offer the session to write the next tokens of a single choice itself."""
        if next_index < self._offers_from or len(self._choices) != 1 or (sink := self._open_sink()) is None:
            return None
        stream = sink.plain_stream(0) if self._choices[0].expects(attempt, next_index) else None
        if stream is None:
            self._offers_from = next_index + _TOKENS_BETWEEN_OFFERS
            return None
        return StreamOffer(
            stream=stream,
            next_index=next_index,
            on_written=partial(self._on_written, sink),
            write_rest=partial(self._write_rest, stream),
        )

    def _on_written(self, sink: DeltaSink, token_ids: Sequence[int], gaps_s: Sequence[float]) -> None:
        try:
            self._choices[0].on_written(token_ids)
            self._account.on_token(len(token_ids))
            sink.on_written(0, gaps_s)
        except Exception as error:  # noqa: BLE001  # as in `_hand_over`
            self._sink_failed(error)
            self._mailbox.post(Recheck())

    def _write_rest(self, stream: PlainStream, rest: bytes) -> None:
        try:
            if not stream.events.write_rest(rest):
                return
            self._sink_is_full = True
        except Exception as error:  # noqa: BLE001  # as in `_hand_over`
            self._sink_failed(error)
        self._mailbox.post(Recheck())

    def _open_sink(self) -> DeltaSink | None:
        """Return the sink if tokens may go straight to it, past the mailbox."""
        if self._sink_is_full or self._hedges is not None or self._mailbox.messages:
            return None
        return self._sink

    def _hand_over(self, sink: DeltaSink, choice: ChoiceRun, attempt: int, arrived: TokensArrived) -> None:
        """Deliver tokens straight to the sink; whatever follows from them is posted as a message."""
        try:
            for delta in choice.on_tokens(attempt, arrived):
                self._account.on_delta(delta)
                if sink.on_delta(delta):
                    self._sink_is_full = True
        except Exception as error:  # noqa: BLE001  # re-raised by the request's own task: the caller here is a session
            self._sink_failed(error)
        else:
            # A full sink has to write before it is given more.
            if not (self._sink_is_full or choice.done or choice.failure or choice.waiting):
                return
        self._mailbox.post(Recheck())

    def _sink_failed(self, error: Exception) -> None:
        self._sink_error = error
        self._abandon_all()

    def _abandon_all(self) -> None:
        if self._hedges is not None:
            self._hedges.close()
        for choice in self._choices:
            choice.abandon()

    def _workers_changed(self) -> None:
        self._mailbox.post(WorkersChanged())

    def _post_later(self, delay_s: float, message: Message) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._mailbox.post, message)


class _Uncounted:
    """The account of a request that nobody is charged for: a probe's."""

    def on_delta(self, delta: ChoiceDelta) -> None:
        """Count nothing."""

    def on_token(self, count: int = 1) -> None:
        """Count nothing."""


_UNCOUNTED = _Uncounted()
