"""A worker with the real scheduler, pool and index; only the duration of a step comes from a latency model.

It cycles as the engine's thread does: calls of others between two steps, `schedule`, the step, `commit`. Steps that
only decode are taken many at once (`engine.scheduler.fast_forward`); a call that arrives meanwhile cuts them short at
the end of the present step.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

from cluster.simulator.inputs.block_names import TraceHasher
from cluster.simulator.inputs.latency import StepLatency, work_of
from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.request import SimRequest
from engine.scheduler.fast_forward import FastForwardScheduler, SteadyRun
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_rates import RateMeter
from engine.types.config import SchedulerConfig
from engine.types.request import Batch, SampledToken
from engine.types.step_output import StepOutput, StepTimings
from router.types.worker_view import WorkerInfo

TOKEN = 1
"""Token that is always sampled: no request of a simulation ends because of it."""
_SAMPLED = SampledToken(token_id=TOKEN)

Call = Callable[[Scheduler], None]


class Steps(NamedTuple):
    """Steps that a worker has just finished."""

    num_steps: int
    seconds: float
    """Duration of all of them; 0 when nothing was computed."""
    num_rows: int
    """Sequences that got a token in each step of a run; for a single step, see the output's events."""


class StepListener(Protocol):
    """Receives a worker's steps when they end."""

    def stepped(self, worker: "SimWorker", output: StepOutput, steps: Steps) -> None:
        """Handle everything that happened since the last call."""
        ...


class _Quiet(NamedTuple):
    """Run of steps in progress that is taken at once."""

    run: SteadyRun
    started_s: float


class SimWorker:
    """Worker on the virtual clock."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        config: SchedulerConfig,
        latency: StepLatency,
        events: EventQueue,
        listener: StepListener,
    ) -> None:
        self.info = info
        self.latency = latency
        self.block_bytes = info.kv_bytes_per_token * info.layout.block_size
        self.scheduler = FastForwardScheduler(config, TraceHasher(config.block_size))
        self.rates = RateMeter()
        self.busy_s = 0.0
        self.num_prompt_tokens = 0
        """Prompt tokens computed so far."""
        self.stepped_s = 0.0
        """End time of its last step."""
        self.link_free_s = 0.0
        """Time by which its network card has sent everything it was given."""
        self.is_dead = False
        self.num_tokens_at_end = 0
        """Tokens of each running sequence, when the worker died, in steps whose end had not been reported."""
        self.has_news = True
        """Whether something has happened since its last report, or is about to."""
        self.joined: list[SimRequest] = []
        """Requests whose prompt came from elsewhere and whose first step here is still to come."""
        self._paces = config.max_step_s is not None
        self._events = events
        self._listener = listener
        self._calls: deque[Call] = deque()
        self.is_busy = False
        self._quiet: _Quiet | None = None
        self._serial = 0
        """Number of the present step: events of any other are void."""
        self._frozen_from_s = inf
        """Start time of the present or last freeze."""
        self._frozen_until_s = 0.0

    def call(self, action: Call) -> None:
        """Run a function between two steps; now, if none is in progress."""
        if self.is_dead:
            return
        self._calls.append(action)
        if not self.is_busy:
            self._turn()
        elif self._quiet is not None:
            self._cut(self._quiet)

    def die(self) -> None:
        """End the process, with everything it held."""
        if self._quiet is not None:
            last_s = self._frozen_from_s if self.is_frozen else self._events.now
            self.num_tokens_at_end = self._num_ended(self._quiet, last_s)
        self.is_dead = True
        self._serial += 1
        self._calls.clear()

    def freeze(self, duration_s: float) -> None:
        """Stop all activity for a time."""
        self._frozen_from_s = self._events.now
        self._frozen_until_s = self._events.now + duration_s

    @property
    def is_frozen(self) -> bool:
        """Whether the worker is doing nothing and sending nothing."""
        return self._frozen_until_s > self._events.now

    def _num_ended(self, quiet: _Quiet, now: float) -> int:
        run, gone_s = quiet.run, now - quiet.started_s
        return bisect_right(
            range(1, run.num_steps),
            gone_s,
            key=lambda count: self.latency.run_seconds(run.num_rows, run.num_context_tokens, count),
        )

    def _turn(self) -> None:
        """Run pending calls, then start the next step."""
        self.is_busy = self.has_news = True
        scheduler = self.scheduler
        while True:
            while self._calls:
                self._calls.popleft()(scheduler)
            run = scheduler.steady_run()
            if run.num_steps:
                self._begin_quiet(run)
                return
            batch = scheduler.schedule(self._events.now)
            if batch is not None:
                self._begin_step(batch)
                return
            if scheduler.has_output:
                self._report_steps(scheduler.drain(), Steps(0, 0.0, 0))
            if not self._calls:
                self.is_busy = False
                return

    def _begin_step(self, batch: Batch) -> None:
        if self.scheduler.has_admissions:
            self._report_steps(self.scheduler.drain(), Steps(0, 0.0, 0))
        work = work_of(batch.items)
        seconds = self.latency.seconds(work)
        self.num_prompt_tokens += work.num_prompt_tokens
        self._serial += 1
        self._events.after(seconds, partial(self._end_step, self._serial, batch, seconds))

    def _end_step(self, serial: int, batch: Batch, seconds: float) -> None:
        if self._is_void(serial, partial(self._end_step, serial, batch, seconds)):
            return
        num_sampled = sum([item.samples for item in batch.items])
        output = self.scheduler.commit(batch, [_SAMPLED] * num_sampled)
        self._observe(seconds, batch.num_tokens, len(batch.items))
        self._report_steps(output, Steps(1, seconds, 0))
        self.stepped_s = self._events.now
        self._turn()

    def _begin_quiet(self, run: SteadyRun) -> None:
        self._quiet = _Quiet(run, self._events.now)
        self._await_quiet(self._quiet, run.num_steps)

    def _await_quiet(self, quiet: _Quiet, num_steps: int) -> None:
        self._serial += 1
        seconds = self.latency.run_seconds(quiet.run.num_rows, quiet.run.num_context_tokens, num_steps)
        self._events.at(quiet.started_s + seconds, partial(self._end_quiet, self._serial, quiet, num_steps, seconds))

    def _cut(self, quiet: _Quiet) -> None:
        """Cut a run of steps short, to process a call: the present step is the last."""
        self._quiet = None
        self._await_quiet(quiet, self._num_ended(quiet, self._events.now) + 1)

    def _end_quiet(self, serial: int, quiet: _Quiet, num_steps: int, seconds: float) -> None:
        if self._is_void(serial, partial(self._end_quiet, serial, quiet, num_steps, seconds)):
            return
        self._quiet = None
        output = self.scheduler.fast_forward(num_steps, TOKEN)
        num_rows = quiet.run.num_rows
        self._observe(seconds / num_steps, num_rows, num_rows)
        self._report_steps(output, Steps(num_steps, seconds, num_rows))
        self.stepped_s = self._events.now
        self._turn()

    def _is_void(self, serial: int, again: Callable[[], None]) -> bool:
        """Return whether a step's end does not happen now: never, or later when the worker thaws."""
        if serial != self._serial:
            return True
        if self.is_frozen:
            self._events.at(self._frozen_until_s, again)
            return True
        return False

    def _observe(self, step_s: float, num_tokens: int, num_requests: int) -> None:
        """Record steps taken at once a single time: their repetition would teach nothing."""
        timings = StepTimings(
            schedule_s=0.0, execute_s=step_s, commit_s=0.0, num_tokens=num_tokens, num_requests=num_requests
        )
        self.rates.observe(timings)
        if self._paces:
            self.scheduler.observe(timings)

    def _report_steps(self, output: StepOutput, steps: Steps) -> None:
        self.busy_s += steps.seconds
        self._listener.stepped(self, output, steps)
