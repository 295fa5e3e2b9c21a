"""Estimates the speed of a cluster's workers from measured steps and the shape of a latency profile. Pure.

A profile predicts a step's time from its work. The measured time of live workers' steps, divided by the predicted time
of the same work, gives a factor for each pool. Until enough is measured, the profile counts.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from cluster.planner.router_figures import RouterFigures, StepCounts
from cluster.planner.staffing import WorkerModel
from tandem.values.roles import WorkerRole

_BELIEVED_S = 5.0
"""Weight of the profile, in seconds of steps."""
_KEPT = 0.98
"""Share of the measurements that is kept from one period to the next."""
_LARGEST = 1000.0

_Steps = dict[tuple[str, str, str], StepCounts]


class SpeedWatch:
    def __init__(self, model: WorkerModel) -> None:
        """`model`: the worker according to the profile."""
        self._model = model
        self._kv_tokens = model.kv_tokens
        self._before: _Steps = {}
        self._measured = dict.fromkeys(WorkerRole, _BELIEVED_S)
        self._predicted = dict.fromkeys(WorkerRole, _BELIEVED_S)

    @property
    def prefill_worker(self) -> WorkerModel:
        return self._model.scaled(self.factor(WorkerRole.PREFILL))

    @property
    def decode_worker(self) -> WorkerModel:
        """Return the model of a decode worker, with the pool size that workers report."""
        return replace(self._model.scaled(self.factor(WorkerRole.DECODE)), kv_tokens=self._kv_tokens)

    def factor(self, role: WorkerRole) -> float:
        """Return how many times slower than the profile this pool's workers are."""
        return min(_LARGEST, max(1.0 / _LARGEST, self._measured[role] / self._predicted[role]))

    def observe(self, now: Sequence[RouterFigures], *, prompt_tokens: float, context_tokens: float | None) -> None:
        """Record a period: mean lengths of prompts and, for generated tokens, of what came before them."""
        steps = _latest(now)
        pools = [figures.decode_kv_tokens for figures in now if figures.decode_kv_tokens is not None]
        self._kv_tokens = min(pools, default=self._kv_tokens)
        before, self._before = self._before, steps
        for role in WorkerRole:
            self._measured[role] = _BELIEVED_S + _KEPT * (self._measured[role] - _BELIEVED_S)
            self._predicted[role] = _BELIEVED_S + _KEPT * (self._predicted[role] - _BELIEVED_S)
        for key, after in steps.items():
            _, role_name, kind = key
            done = _since(before.get(key), after)
            # Each pool by its own kind of work only: prompts on a decode worker are short and share steps with other
            # rows.
            if done is None or role_name != kind:
                continue
            pool = WorkerRole(role_name)
            if pool is WorkerRole.PREFILL:
                self._add(pool, done.seconds, self._prefill_s(done, prompt_tokens))
            elif context_tokens is not None:
                self._add(pool, done.seconds, self._decode_s(done, context_tokens))

    def _add(self, role: WorkerRole, measured_s: float, predicted_s: float) -> None:
        self._measured[role] += measured_s
        self._predicted[role] += predicted_s

    def _prefill_s(self, done: StepCounts, prompt_tokens: float) -> float:
        model = self._model
        pairs = done.tokens * prompt_tokens / 2
        return model.step_s * done.steps + model.prompt_token_s * done.tokens + model.pair_s * pairs

    def _decode_s(self, done: StepCounts, context_tokens: float) -> float:
        model = self._model
        return model.step_s * done.steps + (model.row_s + model.context_token_s * context_tokens) * done.requests


def _latest(now: Sequence[RouterFigures]) -> _Steps:
    """Return the latest report of each worker's steps among those of several routers."""
    steps: _Steps = {}
    for figures in now:
        for key, counts in figures.steps.items():
            if key not in steps or steps[key].steps < counts.steps:
                steps[key] = counts
    return steps


def _since(before: StepCounts | None, after: StepCounts) -> StepCounts | None:
    """Return the difference of two reports; None for a worker that is new or has restarted."""
    if before is None or after.steps < before.steps or after.seconds < before.seconds:
        return None
    return StepCounts(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in fields(StepCounts)})
