"""The engine alone in this process: the real thread, scheduler and runner, without a network or a router.

Its times are those that a worker sees: a token arrives with the engine's callback.
"""

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from engine.assembly import EngineParts, assemble
from engine.engine import Engine
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from engine.types.step_output import StepOutput
from tandem.config.cluster import load
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tandem_bench.engine.workload import Job, Outcome, StepCosts
from tandem_bench.errors import CannotMeasure
from worker.engine_spec import engine_spec

_SECRET = "benchmark-benchmark"
_PATIENCE_S = 600.0

R = TypeVar("R")


class EngineFailed(CannotMeasure):
    """The engine thread ended with an error."""


def assemble_from(overrides: dict[str, Any]) -> EngineParts:
    """Assemble an engine as a single worker on this machine would, from dotted names of the cluster's configuration.

    Raises ConfigError.
    """
    lone = {"prefill.replicas": 0, "decode.replicas": 1, "secret": _SECRET}
    return assemble(engine_spec(load(None, lone | overrides), WorkerRole.DECODE))


class Rig:
    """Engine that another thread drives job by job; a context manager that stops the engine's thread."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._model_s = _time_model(parts.runner)
        self._engine = Engine(
            scheduler=parts.scheduler,
            runner=parts.runner,
            on_step=self._on_step,
            on_fatal=self._on_fatal,
            clock=time.perf_counter,
        )
        self._root = root_hash(secret=_SECRET.encode(), model_fingerprint=parts.layout.model_fingerprint)
        self._ids = itertools.count()
        self._job: _RunningJob | None = None
        self._error: BaseException | None = None
        if parts.disk is not None:
            parts.disk.listen(self._engine.wake)
        self._engine.start()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def run(self, job: Job) -> Outcome:
        """Submit all prompts between two steps, and return once each has its tokens.

        Raises EngineFailed, and the scheduler's errors for rejected requests.
        """
        slots = job.adapter_slots or (-1,) * len(job.prompts)
        running = _RunningJob(
            job,
            requests=[
                self._request(prompt, job.num_tokens, slot) for prompt, slot in zip(job.prompts, slots, strict=True)
            ],
            newcomers=[self._request(prompt, 1) for prompt in job.newcomers],
            call=self._engine.call,
        )
        self._job = running
        model_before_s = self._model_s()
        self._engine.call(running.begin).result()
        in_time = running.is_over.wait(_PATIENCE_S)
        if self._error is not None:
            raise EngineFailed(f"the engine's thread ended with {type(self._error).__name__}") from self._error
        if not in_time:
            raise EngineFailed(f"the engine was silent for {_PATIENCE_S:g} s")
        self._job = None
        return running.outcome(self._model_s() - model_before_s)

    def _request(self, prompt: Sequence[int], num_tokens: int, adapter_slot: int = -1) -> Request:
        return Request(
            request_id=RequestId(f"bench-{next(self._ids)}"),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            hash_root=self._root,
            arrival_s=time.perf_counter(),
            adapter_slot=adapter_slot,
        )

    def _on_step(self, output: StepOutput) -> None:
        if self._job is not None:
            self._job.on_step(output, time.perf_counter())

    def _on_fatal(self, error: BaseException) -> None:
        self._error = error
        if self._job is not None:
            self._job.is_over.set()


class _RunningJob:
    """State of one job; except `is_over`, only the engine's thread touches it until that is set."""

    def __init__(
        self,
        job: Job,
        *,
        requests: list[Request],
        newcomers: list[Request],
        call: Callable[[Callable[[Scheduler], None]], object],
    ) -> None:
        self.is_over = threading.Event()
        self._job = job
        self._requests = requests
        self._arrivals: dict[RequestId, list[float]] = {request.request_id: [] for request in requests}
        self._tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        self._num_missing = len(requests) * job.num_tokens
        self._newcomers = newcomers
        self._newcomer: RequestId | None = None
        self._num_newcomers = 0
        self._call = call
        self._started_s = self._told_s = time.perf_counter()
        self._execute_s = 0.0
        self._steps_s: list[float] = []
        self._decode_steps_s: list[float] = []

    def begin(self, scheduler: Scheduler) -> None:
        self._started_s = self._told_s = time.perf_counter()
        for request in self._requests:
            scheduler.add(request)

    def on_step(self, output: StepOutput, now_s: float) -> None:
        """Record the events of one step."""
        if (timings := output.timings) is not None:
            step_s, self._told_s = now_s - self._told_s, now_s
            self._steps_s.append(step_s)
            self._execute_s += timings.execute_s
            if timings.num_tokens == timings.num_requests:
                self._decode_steps_s.append(step_s)
        for event in output.events:
            if event.token is None or self.is_over.is_set():
                continue
            if event.request_id == self._newcomer:
                self._newcomer, self._num_newcomers = None, self._num_newcomers + 1
            elif event.request_id in self._arrivals:
                self._arrivals[event.request_id].append(now_s - self._started_s)
                self._tokens[event.request_id].append(event.token.token_id)
                self._num_missing -= 1
        if not self._num_missing:
            self._finish()
        elif self._newcomers and self._newcomer is None and all(self._arrivals.values()):
            newcomer = self._newcomers.pop()
            self._newcomer = newcomer.request_id
            self._call(lambda scheduler: scheduler.add(newcomer))

    def _finish(self) -> None:
        if (left := self._newcomer) is not None:
            self._newcomer = None
            self._call(lambda scheduler: _abort(scheduler, left))
        self.is_over.set()

    def outcome(self, model_s: float) -> Outcome:
        """Return the times of the whole job."""
        wall_s = sum(self._steps_s)
        return Outcome(
            job=self._job,
            arrivals_s=tuple(map(tuple, self._arrivals.values())),
            num_newcomers=self._num_newcomers,
            steps=StepCosts(
                num_steps=len(self._steps_s),
                wall_s=wall_s,
                execute_s=self._execute_s,
                model_s=model_s,
                decode_steps_s=tuple(self._decode_steps_s),
            ),
            tokens=tuple(map(tuple, self._tokens.values())),
        )


def _abort(scheduler: Scheduler, request_id: RequestId) -> None:
    scheduler.abort(request_id)


def _time_model(runner: Any) -> Callable[[], float]:
    """Time the model's entry points, including recorded steps; return a function for the seconds so far.

    On a device that runs asynchronously this counts the host's waiting time, which overlaps with nothing.
    """
    spent = [0.0]

    def timed(fn: Callable[..., R]) -> Callable[..., R]:
        def call(*arguments: Any, **named: Any) -> R:
            started_s = time.perf_counter()
            try:
                return fn(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - started_s

        return call

    for subject, names in (
        (runner.model, ("forward", "logits", "logits_of_embedded")),
        (runner.graphs, ("replay",)),
    ):
        for name in names:
            with suppress(AttributeError):
                setattr(subject, name, timed(getattr(subject, name)))
    return lambda: spent[0]
