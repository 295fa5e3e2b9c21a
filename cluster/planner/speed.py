"""How fast this cluster's workers are, by what their steps took: a latency profile's shape, at their own speed. Pure.

A profile says how a step's time follows from its work. What live workers' steps took, divided by what the profile says
of the same work, is a factor for each pool. Until much was measured the profile is believed.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from cluster.planner.router_figures import RouterFigures, StepCounts
from cluster.planner.staffing import WorkerModel
from tandem.values.roles import WorkerRole

_BELIEVED_S = 5.0
"""Seconds of steps that the profile's word is worth."""
_KEPT = 0.98
"""Of what was measured, from one period to the next."""
_LARGEST = 1000.0

_Steps = dict[tuple[str, str, str], StepCounts]


class SpeedWatch:
    def __init__(self, model: WorkerModel) -> None:
        """`model`: by the profile."""
        self._model = model
        self._kv_tokens = model.kv_tokens
        self._before: _Steps = {}
        self._measured = dict.fromkeys(WorkerRole, _BELIEVED_S)
        self._told = dict.fromkeys(WorkerRole, _BELIEVED_S)

    @property
    def prefill_worker(self) -> WorkerModel:
        return self._model.scaled(self.factor(WorkerRole.PREFILL))

    @property
    def decode_worker(self) -> WorkerModel:
        """For answers; its pool is as large as workers say."""
        return replace(self._model.scaled(self.factor(WorkerRole.DECODE)), kv_tokens=self._kv_tokens)

    def factor(self, role: WorkerRole) -> float:
        """By how much this pool's workers are slower than the profile."""
        return min(_LARGEST, max(1.0 / _LARGEST, self._measured[role] / self._told[role]))

    def observe(self, now: Sequence[RouterFigures], *, prompt_tokens: float, context_tokens: float | None) -> None:
        """Once a period. Mean lengths of prompts and, of tokens that were written, of what was before them."""
        steps = _latest(now)
        pools = [figures.decode_kv_tokens for figures in now if figures.decode_kv_tokens is not None]
        self._kv_tokens = min(pools, default=self._kv_tokens)
        before, self._before = self._before, steps
        for role in WorkerRole:
            self._measured[role] = _BELIEVED_S + _KEPT * (self._measured[role] - _BELIEVED_S)
            self._told[role] = _BELIEVED_S + _KEPT * (self._told[role] - _BELIEVED_S)
        for key, after in steps.items():
            _, role_name, kind = key
            done = _since(before.get(key), after)
            # Each pool by its own trade alone: a decode worker's prompts are short ones, with others' rows among them.
            if done is None or role_name != kind:
                continue
            pool = WorkerRole(role_name)
            if pool is WorkerRole.PREFILL:
                self._add(pool, done.seconds, self._prefill_s(done, prompt_tokens))
            elif context_tokens is not None:
                self._add(pool, done.seconds, self._decode_s(done, context_tokens))

    def _add(self, role: WorkerRole, measured_s: float, told_s: float) -> None:
        self._measured[role] += measured_s
        self._told[role] += told_s

    def _prefill_s(self, done: StepCounts, prompt_tokens: float) -> float:
        model = self._model
        pairs = done.tokens * prompt_tokens / 2
        return model.step_s * done.steps + model.prompt_token_s * done.tokens + model.pair_s * pairs

    def _decode_s(self, done: StepCounts, context_tokens: float) -> float:
        model = self._model
        return model.step_s * done.steps + (model.row_s + model.context_token_s * context_tokens) * done.requests


def _latest(now: Sequence[RouterFigures]) -> _Steps:
    """Of what several routers tell of one worker, the word that is latest."""
    steps: _Steps = {}
    for figures in now:
        for key, counts in figures.steps.items():
            if key not in steps or steps[key].steps < counts.steps:
                steps[key] = counts
    return steps


def _since(before: StepCounts | None, after: StepCounts) -> StepCounts | None:
    """None for a worker that is new, or began anew."""
    if before is None or after.steps < before.steps or after.seconds < before.seconds:
        return None
    return StepCounts(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in fields(StepCounts)})
