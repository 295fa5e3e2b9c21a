"""Measures what a model, or a way to compute it, loses against a base, and judges it by one table of limits."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engine.model.config import load_model_config
from engine.model.dtype import resolve_dtype
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError, InvalidRequest
from tandem.model_path import model_directory
from tandem.values.kv_layout import AUTO_DTYPE
from tandem.values.quantization import QUANTIZED_DTYPES
from tandem_bench.quality.engine_forward import EngineForward, Precision
from tandem_bench.quality.questions import Question, json_questions, needle_questions
from tandem_bench.quality.text_scores import TextScores, expectations, story_windows, text_windows
from tandem_bench.report import Row, figure
from worker.decisions.quality_gate import LIMITS, QualityGate, scheme_of

_SAMPLE_CHARS = 1 << 16
LM_EVAL = "lm_eval:"
"""Beginning of a suite that is a task of lm-evaluation-harness."""
LM_EVAL_TOKENS = 4096
"""Longest sequence of a task, where the model's context is not shorter; longer contexts lose their beginning."""
_GATE_WINDOWS = 16
"""Windows of text in a gate: enough for an error of the mean far below any limit, few enough for every start."""


MAX_POINTS_LOST = 2.0
"""Greatest fall of a share of right answers, in percentage points, with every scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to compare, by which suites and how thoroughly."""

    model: str
    precision: Precision
    base: str
    base_precision: Precision
    suites: Sequence[str]
    text: str | None
    """Text to score; None: generated stories."""
    samples: int
    lengths: Sequence[int]
    num_threads: int


def resolve_precision(model: str, *, dtype: str, quantization: str, kv_dtype: str) -> Precision:
    """Resolve the dtype `auto`: to the model's, or to bfloat16 where weights cannot be quantized so at load in that.

    Raises ConfigError when the model cannot be read.
    """
    found = resolve_dtype(dtype, model)
    if dtype == AUTO_DTYPE and found not in QUANTIZED_DTYPES.get(quantization, (found,)):
        found = "bfloat16"
    return Precision(dtype=found, quantization=quantization, kv_dtype=kv_dtype)


class Comparison:
    """Two models, and what both are asked, in the tokens of the one that is judged."""

    def __init__(self, plan: Plan, note: Callable[[str], None]) -> None:
        """Prepare all prompts, then load both models. `note` is told what is done next.

        Raises ConfigError, for models that cannot be compared and prompts beyond the context too.
        """
        self._plan = plan
        self._note = note
        folder, base_folder = model_directory(plan.model), model_directory(plan.base)
        self._tokenizer = Tokenizer.load(folder)
        if base_folder != folder:
            self._check_base(Tokenizer.load(base_folder))
        self._windows = self._scored_windows()
        self._questions = self._asked_questions()
        self._tasks = [name.removeprefix(LM_EVAL) for name in plan.suites if name.startswith(LM_EVAL)]
        longest = max(
            [
                *map(len, self._windows),
                *(len(ids) + one.max_tokens for asked in self._questions.values() for one, ids in asked),
            ],
            default=1,
        )
        contexts = {one: load_model_config(one).max_context for one in (folder, base_folder)}
        if self._tasks:
            longest = max(longest, min(LM_EVAL_TOKENS, *contexts.values()))
        self._longest = longest
        for one, context in contexts.items():
            if longest > context:
                raise ConfigError(
                    f"{one}: the suites need sequences of {longest} tokens, but the context is {context}: "
                    "choose shorter --lengths, or other suites"
                )
        note(f"loading the base, {plan.base} in {plan.base_precision.dtype}")
        self._base = EngineForward(base_folder, plan.base_precision, num_threads=plan.num_threads, max_tokens=longest)
        note(f"loading {plan.model} in {plan.precision.dtype}")
        self._model = EngineForward(folder, plan.precision, num_threads=plan.num_threads, max_tokens=longest)
        if self._model.vocab_size != self._base.vocab_size:
            raise ConfigError(
                f"the model has logits for {self._model.vocab_size} tokens, the base for {self._base.vocab_size}: "
                "they cannot be compared"
            )

    def _check_base(self, base: Tokenizer) -> None:
        """Refuse a base that reads texts differently: then nothing per token can be compared. Raises ConfigError."""
        samples = [question.text for question in json_questions(8)]
        if self._plan.text is not None:
            samples.append(self._plan.text[:_SAMPLE_CHARS])
        if any(_encode(self._tokenizer, sample) != _encode(base, sample) for sample in samples):
            raise ConfigError("the model and the base split a text into different tokens: they cannot be compared")

    def _scored_windows(self) -> list[list[int]]:
        """Return windows of the text or, without one, of generated stories. Raises ConfigError for an empty text."""
        plan = self._plan
        if not {"perplexity", "kl"} & set(plan.suites):
            return []
        if plan.text is None:
            return story_windows(self._tokenizer, plan.samples)
        windows = text_windows(self._tokenizer, _encode(self._tokenizer, plan.text), plan.samples)
        if not windows:
            raise ConfigError("the text to score has fewer than two tokens")
        return windows

    def _asked_questions(self) -> dict[str, list[tuple[Question, list[int]]]]:
        """Return the questions of each name of a figure, with their prompts. Raises ConfigError."""
        plan = self._plan
        made: dict[str, Iterator[Question]] = {}
        if "needle" in plan.suites:
            for length in plan.lengths:
                made[f"needle.{length}"] = needle_questions(plan.samples, length, self._count)
        if "json" in plan.suites:
            made["json"] = json_questions(plan.samples)
        try:
            return {name: [(one, one.prompt(self._tokenizer)) for one in found] for name, found in made.items()}
        except InvalidRequest as error:
            raise ConfigError(f"the chat template refuses a plain question: {error}") from None

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    @property
    def scheme(self) -> str:
        """Key of LIMITS."""
        return scheme_of(self._plan.precision.quantization, self._model.weight_format)

    def rows(self) -> Iterator[list[Row]]:
        """Measure suite by suite, and needles length by length."""
        if "perplexity" in self._plan.suites:
            yield self._perplexity_rows()
        if "kl" in self._plan.suites:
            yield self._divergence_rows()
        for name, asked in self._questions.items():
            self._note(f"{name}: {len(asked)} questions")
            yield self._answered(name, asked)
        for task in self._tasks:
            yield self._task_rows(task)

    @cached_property
    def _text_scores(self) -> TextScores:
        self._note(f"scoring {sum(map(len, self._windows))} tokens in {len(self._windows)} windows")
        scores = TextScores()
        scores.add(self._base, self._model, self._windows)
        return scores

    def gate(self) -> QualityGate:
        """Return what the base expects of the text, for `engine.quality_gate`."""
        plan, windows = self._plan, self._windows
        chosen = [windows[i * len(windows) // _GATE_WINDOWS] for i in range(_GATE_WINDOWS)]
        if len(windows) < _GATE_WINDOWS:
            chosen = windows
        self._note(f"scoring {sum(map(len, chosen))} tokens for the gate")
        return QualityGate(
            base=f"{plan.base} in {plan.base_precision.dtype}",
            vocab_size=self._base.vocab_size,
            windows=tuple(expectations(self._base, ids) for ids in chosen),
        )

    def _perplexity_rows(self) -> list[Row]:
        scores, limits = self._text_scores, LIMITS[self.scheme]
        rise = 100 * (scores.perplexity / scores.base_perplexity - 1)
        return [
            figure("perplexity.tokens", scores.num_tokens, "tokens"),
            figure("perplexity.base", scores.base_perplexity, "per token"),
            figure("perplexity.model", scores.perplexity, "per token"),
            figure("perplexity.rise", rise, "%", at_most=limits.perplexity_percent),
        ]

    def _divergence_rows(self) -> list[Row]:
        scores = self._text_scores
        # A cache of eight bits rounds as well, and nothing is promised of its divergence.
        limit = LIMITS[self.scheme].divergence_nats if self._plan.precision.kv_dtype == AUTO_DTYPE else None
        return [
            figure("kl.tokens", scores.num_tokens, "tokens"),
            figure("kl.mean", scores.mean_divergence, "nats", at_most=limit),
            figure("kl.p99", scores.p99_divergence, "nats"),
            figure("kl.top1", scores.agreement_percent, "% agree"),
        ]

    def _answered(self, name: str, asked: Sequence[tuple[Question, list[int]]]) -> list[Row]:
        """Ask both models; of needles, state the model's share by depth as well."""
        base = [self._is_right(self._base, *one) for one in asked]
        model = [self._is_right(self._model, *one) for one in asked]
        by_depth: dict[int, list[bool]] = {}
        for (question, _), is_right in zip(asked, model, strict=True):
            by_depth.setdefault(question.depth, []).append(is_right)
        depths = sorted(by_depth.items()) if len(by_depth) > 1 else []
        return [
            figure(f"{name}.base", _percent(base), "% right"),
            figure(f"{name}.model", _percent(model), "% right"),
            *(figure(f"{name}.model.at_{depth}", _percent(right), "% right") for depth, right in depths),
            # Not the difference of the two shares, which rounding could lift above the limit.
            figure(f"{name}.lost", 100 * (sum(base) - sum(model)) / len(asked), "points", at_most=MAX_POINTS_LOST),
        ]

    def _task_rows(self, task: str) -> list[Row]:
        """Have both models do a task of lm-evaluation-harness. Raises ConfigError."""
        from tandem_bench.quality.lm_eval_tasks import EngineLM, evaluate

        self._note(f"{LM_EVAL}{task}: at most {self._plan.samples} samples")
        models = [EngineLM(one, self._tokenizer, self._longest) for one in (self._base, self._model)]
        base, model = evaluate(models, task, self._plan.samples)
        rows = []
        for metric, (value, more_is_better) in model.items():
            name, before = f"{LM_EVAL}{Path(task).stem}.{metric}", base[metric][0]
            is_share = more_is_better and 0.0 <= min(value, before) <= max(value, before) <= 1.0
            rows += [figure(f"{name}.base", before, ""), figure(f"{name}.model", value, "")]
            if is_share:
                rows.append(figure(f"{name}.lost", 100 * (before - value), "points", at_most=MAX_POINTS_LOST))
            elif not more_is_better and before > 0.0:
                limit = LIMITS[self.scheme].perplexity_percent
                rows.append(figure(f"{name}.rise", 100 * (value / before - 1), "%", at_most=limit))
        return rows

    def _is_right(self, model: EngineForward, question: Question, ids: list[int]) -> bool:
        answer = model.greedy(ids, max_tokens=question.max_tokens)
        return question.is_right(self._tokenizer.decode(answer))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text without the tokenizer's own tokens. Raises ConfigError for a text that no prompt may hold."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except InvalidRequest as error:
        raise ConfigError(f"the text to score: {error}") from None


def _percent(found: Sequence[bool]) -> float:
    return 100 * sum(found) / len(found)


def measure(plan: Plan, rows: list[Row], *, note: Callable[[str], None], gate: Path | None = None) -> None:
    """Measure suite by suite, adding to `rows`, so that a later failure loses nothing. `gate`: file to write a gate to,
    first. Raises ConfigError.
    """
    torch.set_num_threads(plan.num_threads)
    comparison = Comparison(plan, note)
    if gate is not None:
        _write_gate(comparison.gate(), gate)
    for found in comparison.rows():
        rows += found


def _write_gate(gate: QualityGate, path: Path) -> None:
    """Write a whole file or none. Raises ConfigError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(gate.model_dump_json(), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--gate {path}: {error.strerror}") from None
