"""The engine's one thread: it alone touches the scheduler, the runner and, through it, the device.

Other threads submit closures with `call`, which run between two launches, and get one callback per step. A pipelined
engine plans and launches a step while the previous one still runs, so that the device never waits for the host. With
nothing to run, the thread sleeps on a condition until the next call. A failure of the runner or a broken invariant ends
it: pending calls fail, `on_fatal` is called, and the process is expected to exit rather than serve from a broken state.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.scheduler.scheduler import Scheduler
from engine.stall import EngineTurn
from engine.types.request import Batch
from engine.types.runner import LaunchedStep, Runner
from engine.types.step_output import LayersDone, PromptInStep, StepOutput, StepTimings
from tandem.errors import InternalError, ServingError, Unavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Call(Generic[T]):
    """A caller's closure, and the future that gets its result."""

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
            # It may have left the scheduler half changed, so it fails the caller and ends the engine.
            self.future.set_exception(bug)
            raise
        else:
            self.future.set_result(result)

    def fail(self, error: ServingError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A launched step that has not been settled."""

    batch: Batch
    num_tokens: int
    step: LaunchedStep
    schedule_s: float
    launched_s: float
    """Time at which the runner was called."""
    ended_s: float | None
    """Time at which `launch` returned, if the step had ended by then: its time then excludes the next launch."""


class Engine:
    """Runs steps while there is work, and callers' closures between them."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        on_step: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        pipelined: bool = False,
        on_layers: Callable[[LayersDone], None] | None = None,
    ) -> None:
        """Both callbacks run on the engine thread and must only pass their value on.

        `on_step` gets one output per step, preceded by one without tokens when requests leave the queue, so that a
        hand-off can be offered while its prefill runs. `clock` is the one that requests' `arrival_s` is read from.
        `pipelined`: launch a step before the previous one has ended. `on_layers` is called within a step as layers are
        done, if the step computes `prefill_only` prompts and the runner reports layers.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._on_step = on_step
        self._on_fatal = on_fatal
        self._clock = clock
        self._pipelined = pipelined
        self._on_layers = on_layers
        self._launched: _Launched | None = None
        self._ended_s = 0.0
        """Time at which the last settled step ended."""
        self._wake = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()
        self._closed: ServingError | None = None
        self._is_stopping = False
        self._is_idle = True
        self._is_woken = False
        self._num_turns = 0
        self.turn: EngineTurn | None = None
        """The thread's present turn, for any thread to read; None while it sleeps."""
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop after the steps in flight and fail pending calls. Returns False if the thread did not end in time."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, fn: Callable[[Scheduler], T]) -> "Future[T]":
        """Run `fn` on the engine thread between two launches; from any thread.

        A ServingError from `fn` fails the future only; any other exception also ends the engine. After the end the
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

    def replace_runner(self, replace: Callable[[Runner], Runner]) -> None:
        """Replace the runner from the next launch on. Call it only from a closure on the engine's thread."""
        self._runner = replace(self._runner)

    def wake(self) -> None:
        """Wake the engine to plan again after a change that the scheduler depends on; from any thread."""
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._runner.bind_thread()
            while self._wait():
                self._num_turns += 1
                self.turn = EngineTurn(self._num_turns)
                # Only those queued by now: a flood of calls must not starve the steps.
                for _ in range(len(self._calls)):
                    self._calls.popleft().run(self._scheduler)
                self._is_idle = not self._step()
            self._settle()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: nothing above it would report the error
            # The class only: a message may quote what a request contained.
            _log.critical("the engine failed: %s", type(error).__name__)
            self._close(InternalError("the engine has failed"))
            self._on_fatal(error)
        else:
            self._close(Unavailable("the engine has stopped"))

    def _wait(self) -> bool:
        """Sleep while there is nothing to do. Returns False when the engine is stopping."""
        patience_s = self._scheduler.patience_s(self._clock()) if self._is_idle else None
        self.turn = None
        with self._wake:
            while self._is_idle and not (self._calls or self._is_stopping or self._is_woken):
                if not self._wake.wait(patience_s):
                    break
            self._is_woken = False
            return not self._is_stopping

    def _close(self, error: ServingError) -> None:
        with self._wake:
            self._closed = error
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.fail(error)

    def _step(self) -> bool:
        """Launch one batch and settle the previous or the same one. Returns False when there was neither."""
        scheduler = self._scheduler
        started_s = self._clock()
        batch = scheduler.schedule(started_s)
        if batch is None:
            if self._launched is None:
                if scheduler.has_output:
                    self._on_step(scheduler.drain())
                return False
            self._settle()
            return True
        scheduled_s = self._clock()
        if scheduler.has_admissions:
            self._on_step(scheduler.drain())
        launched = self._launch(batch, scheduled_s - started_s)
        self._settle()
        self._launched = launched
        if not self._pipelined or batch.saves_free_blocks:
            self._settle()
        return True

    def _launch(self, batch: Batch, schedule_s: float) -> _Launched:
        num_tokens = batch.num_tokens
        before = 0 if self._launched is None else self._launched.num_tokens
        self.turn = EngineTurn(self._num_turns, before + num_tokens)
        launched_s = self._clock()
        step = self._runner.launch(batch, self._layers_listener(batch))
        ended_s = self._clock() if self._pipelined and step.is_over() else None
        return _Launched(
            batch=batch,
            num_tokens=num_tokens,
            step=step,
            schedule_s=schedule_s,
            launched_s=launched_s,
            ended_s=ended_s,
        )

    def _layers_listener(self, batch: Batch) -> Callable[[int], None] | None:
        listener = self._on_layers
        if listener is None:
            return None
        prompts = tuple(
            PromptInStep(
                request.request_id,
                start,
                start + num_tokens,
                tuple(request.block_table),
                () if request.windows is None else request.windows.blocks(0, len(request.windows)),
            )
            for request, start, num_tokens, *_ in batch.items
            if request.prefill_only
        )
        if not prompts:
            return None
        return lambda num_layers: listener(LayersDone(num_layers=num_layers, prompts=prompts))

    def _settle(self) -> None:
        """Wait for the launched step, if there is one, and report its output."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        tokens = launched.step.tokens()
        sampled_s = self._clock()
        ended_s = sampled_s if launched.ended_s is None else launched.ended_s
        output = self._scheduler.commit(launched.batch, tokens)
        timings = StepTimings(
            schedule_s=launched.schedule_s,
            # A device begins a step once it has finished the previous one.
            execute_s=ended_s - max(launched.launched_s, self._ended_s),
            commit_s=self._clock() - sampled_s,
            num_tokens=launched.num_tokens,
            num_requests=len(launched.batch.items),
            is_overlapped=self._pipelined and launched.ended_s is None,
            num_draft_tokens=launched.batch.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
        )
        self._ended_s = ended_s
        self._scheduler.observe(timings)
        self._on_step(output._replace(timings=timings))
