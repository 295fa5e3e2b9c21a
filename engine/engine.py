"""The engine's one thread: it alone touches the scheduler, the runner and, through it, the device.

Others hand it closures (`call`), run between two steps, and get one callback per step. When nothing can run the
thread sleeps on a condition until the next call. A failure of the runner or a broken invariant ends it: the pending
calls fail, `on_fatal` is told, and the process is expected to die; a half-known state is never served from.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step import StepOutput, StepTimings
from tandem.errors import InternalError, ServingError, Unavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Call(Generic[T]):
    """Somebody's closure and where its result goes."""

    __slots__ = ("_fn", "future")

    def __init__(self, fn: Callable[[Scheduler], T]) -> None:
        self._fn = fn
        self.future: Future[T] = Future()

    def run(self, scheduler: Scheduler) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(scheduler)
        except ServingError as refusal:
            self.future.set_exception(refusal)
        except BaseException as bug:
            # It may have left the scheduler half changed: the caller learns it, and so does the engine.
            self.future.set_exception(bug)
            raise
        else:
            self.future.set_result(result)

    def fail(self, error: ServingError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Engine:
    """Runs steps for as long as there is work, and other people's closures in between."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        on_step: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both callbacks run on the engine thread and must only pass their value on.

        `on_step` gets one output per step, preceded by one without tokens when requests leave the queue, so that a
        hand-off can be offered while its prefill runs. `clock` is the one that requests' `arrival_s` is read from.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._on_step = on_step
        self._on_fatal = on_fatal
        self._clock = clock
        self._wake = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()
        self._closed: ServingError | None = None
        self._is_stopping = False
        self._is_idle = True
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; once in an engine's life."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the step under way; pending calls fail. False when the thread did not end in time."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, fn: Callable[[Scheduler], T]) -> "Future[T]":
        """Run `fn` on the engine thread between two steps; from any thread.

        A ServingError that it raises is its caller's; any other exception also ends the engine. After the end the
        future fails with Unavailable (stopped) or InternalError (failed).
        """
        call = _Call(fn)
        with self._wake:
            closed = self._closed
            if closed is None:
                self._calls.append(call)
                self._wake.notify()
        if closed is not None:
            call.fail(closed)
        return call.future

    def _run(self) -> None:
        try:
            self._runner.bind_thread()
            while self._wait():
                # Those here now; later ones wait for the next turn, or a storm of calls would stop all steps.
                for _ in range(len(self._calls)):
                    self._calls.popleft().run(self._scheduler)
                self._is_idle = not self._step()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: nobody else would be told
            # The class only: a message may quote what a request contained.
            _log.critical("the engine failed: %s", type(error).__name__)
            self._close(InternalError("the engine has failed"))
            self._on_fatal(error)
        else:
            self._close(Unavailable("the engine has stopped"))

    def _wait(self) -> bool:
        """Sleep while there is nothing to do; False when it is time to end."""
        with self._wake:
            while self._is_idle and not self._calls and not self._is_stopping:
                self._wake.wait()
            return not self._is_stopping

    def _close(self, error: ServingError) -> None:
        with self._wake:
            self._closed = error
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.fail(error)

    def _step(self) -> bool:
        """Run one batch; False when there was none to run."""
        scheduler = self._scheduler
        started_s = self._clock()
        batch = scheduler.schedule(started_s)
        scheduled_s = self._clock()
        if batch is None:
            if scheduler.has_notices:
                self._on_step(scheduler.drain())
            return False
        if scheduler.has_admissions:
            self._on_step(scheduler.drain())
        executing_s = self._clock()
        sampled = self._runner.execute(batch)
        executed_s = self._clock()
        output = scheduler.commit(batch, sampled)
        timings = StepTimings(
            schedule_s=scheduled_s - started_s,
            execute_s=executed_s - executing_s,
            commit_s=self._clock() - executed_s,
            num_tokens=batch.num_tokens,
            num_requests=len(batch.items),
        )
        self._on_step(replace(output, timings=timings))
        return True
