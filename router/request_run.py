"""One client request under way.

All that happens to it arrives in one mailbox and is handled in order by whoever awaits `step`; what to do is
decided by `ChoiceProgress` and `Placer`. Orders to workers never wait, so the whole request is one coroutine.
"""

import asyncio

from router.choice_run import ChoiceRun, Surroundings
from router.mailbox import (
    DeadlinePassed,
    FromWorker,
    Mail,
    Mailbox,
    Overflowed,
    RejoinOver,
    StopChoice,
    WorkersChanged,
)
from router.requests import ChoiceDelta, RoutedRequest
from router.session_events import AttemptEvent
from tandem.errors import DeadlineExceeded, Overloaded
from tandem.ids import BlockHash
from tandem.outputs import FinishReason


class RequestRun:
    """Drives all choices of one request to their end."""

    def __init__(self, request: RoutedRequest, around: Surroundings) -> None:
        self._request = request
        self._around = around
        self._mailbox = Mailbox(max_tokens=around.settings.stream_buffer_tokens * request.num_choices)
        self._deadline: asyncio.TimerHandle | None = None
        self._rejoin: asyncio.TimerHandle | None = None
        names: list[BlockHash] = []
        around.hasher.extend(request.hash_root, names, request.prompt_token_ids)
        self._choices = [ChoiceRun(i, request, names, around, self._post) for i in range(request.num_choices)]

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.done for choice in self._choices)

    def start(self) -> None:
        """Send every choice to a worker. Raises the errors of Generator."""
        if self._request.deadline_s is not None:
            remaining_s = self._request.deadline_s - self._around.clock()
            self._deadline = self._mail_later(max(0.0, remaining_s), DeadlinePassed())
        for choice in self._choices:
            choice.submit()

    async def step(self) -> list[ChoiceDelta]:
        """Wait for the next thing to happen; what the client gets of it. Raises the errors of Generator."""
        deltas = self._handle(await self._mailbox.get())
        self._watch_for_workers()
        return deltas

    def stop_choice(self, index: int) -> None:
        """End one choice at once; its finish comes with the next deltas. No-op for one that has ended."""
        choice = self._choices[index]
        if not choice.done:
            choice.abandon()
            self._mailbox.put(StopChoice(choice_index=index))

    def close(self) -> None:
        """Cancel whatever still runs on any worker, and forget the request."""
        for timer in (self._deadline, self._rejoin):
            if timer is not None:
                timer.cancel()
        self._around.placer.registry.unwatch(self._workers_changed)
        self._abandon_all()

    def _handle(self, mail: Mail) -> list[ChoiceDelta]:
        match mail:
            case FromWorker():
                return self._choices[mail.choice_index].take(mail.attempt, mail.event)
            case StopChoice():
                choice = self._choices[mail.choice_index]
                return [] if choice.done else [choice.finish_early(FinishReason.STOP)]
            case WorkersChanged():
                for waiting in self._waiting():
                    waiting.submit()
            case RejoinOver():
                for waiting in self._waiting():
                    raise waiting.final_error()
            case DeadlinePassed():
                raise DeadlineExceeded("the request's time ran out")
            case Overflowed():
                retry_after_s = self._around.settings.retry_after_s
                raise Overloaded("the client reads too slowly", retry_after_s=retry_after_s)
        return []

    def _waiting(self) -> list[ChoiceRun]:
        return [choice for choice in self._choices if choice.waiting]

    def _watch_for_workers(self) -> None:
        """Be told of new workers, for a bounded time, exactly while a choice waits for one."""
        registry = self._around.placer.registry
        if not self._waiting():
            if self._rejoin is not None:
                registry.unwatch(self._workers_changed)
                self._rejoin.cancel()
                self._rejoin = None
        elif self._rejoin is None:
            registry.watch(self._workers_changed)
            self._rejoin = self._mail_later(self._around.settings.rejoin_s, RejoinOver())

    def _post(self, choice_index: int, attempt: int, event: AttemptEvent) -> None:
        self._mailbox.put(FromWorker(choice_index=choice_index, attempt=attempt, event=event))
        if self._mailbox.overflowed:
            self._abandon_all()

    def _abandon_all(self) -> None:
        for choice in self._choices:
            choice.abandon()

    def _workers_changed(self) -> None:
        self._mailbox.put(WorkersChanged())

    def _mail_later(self, delay_s: float, mail: Mail) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._mailbox.put, mail)
