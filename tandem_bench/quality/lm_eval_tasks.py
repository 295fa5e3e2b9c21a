"""Any task of EleutherAI's lm-evaluation-harness, computed by the engine as a worker would.

Imported only where a task is asked for: the library comes with the extra `eval`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError, InvalidRequest
from tandem_bench.quality.engine_forward import EngineForward

_MAX_NEW_TOKENS = 256
"""Length of an answer where a task does not say."""
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NO_FILTER = "none"


class EngineLM(LM):  # type: ignore[misc]  # the library has no types
    """A loaded model, as the harness asks it."""

    def __init__(self, forward: EngineForward, tokenizer: Tokenizer, max_tokens: int) -> None:
        super().__init__()
        self._texts = _Texts(forward, tokenizer, max_tokens)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return each continuation's log probability after its context, and whether it is what greedy decoding says."""
        return [self._texts.continued(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log probability of each text, in windows of the longest sequence."""
        return [sum(one for one, _ in self._texts.in_windows(request.args[0])) for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy answers, up to a stop string. Raises ConfigError for a task that samples."""
        return [self._texts.answer(*request.args) for request in requests]


class _Texts:
    """Texts in the tokens of one model, scored and continued."""

    def __init__(self, forward: EngineForward, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._forward = forward
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        bos = tokenizer.bos_token_id
        self._prefix = min(forward.eos_token_ids, default=0) if bos is None else bos
        """What precedes a text without a context, as with the harness's own models."""

    def continued(self, context: str, continuation: str) -> tuple[float, bool]:
        if not context:
            ids = self._encode(continuation, whole=False)
            return self._scored([self._prefix], ids)
        # A space between both is part of the continuation's first token.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._encode(stripped) or [self._prefix]
        ids = self._encode(stripped + continuation)
        return self._scored(before, ids[len(before) :])

    def in_windows(self, text: str) -> Iterator[tuple[float, bool]]:
        ids = self._encode(text, whole=False)
        for window in get_rolling_token_windows(ids, self._prefix, self._max_tokens, context_len=1):
            yield self._scored(*make_disjoint_window(window))

    def answer(self, context: str, wanted: dict[str, Any]) -> str:
        if wanted.get("do_sample") and wanted.get("temperature", 1.0):
            raise ConfigError("the task samples its answers, which two models cannot be compared by")
        stops = wanted.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        most = next((int(wanted[name]) for name in _LENGTH_NAMES if wanted.get(name)), _MAX_NEW_TOKENS)
        most = min(most, self._max_tokens - 1)
        ids = self._encode(context)[most - self._max_tokens :]

        def text_of(answer: list[int]) -> str:
            return self._tokenizer.decode(answer)

        answer = self._forward.greedy(
            ids, max_tokens=most, is_over=lambda so_far: any(stop in text_of(so_far) for stop in stops)
        )
        text = text_of(answer)
        return text[: min([len(text), *(at for stop in stops if (at := text.find(stop)) >= 0)])]

    def _scored(self, before: list[int], ids: list[int]) -> tuple[float, bool]:
        """Score `ids` after `before`, of which the end is kept where both are too long."""
        if not ids:
            return 0.0, True
        inputs = [*before, *ids][-self._max_tokens - 1 : -1]
        targets = torch.tensor(ids[-len(inputs) :])
        rows = self._forward(inputs)[-len(targets) :].double().log_softmax(-1)
        scores = rows.gather(1, targets[:, None])[:, 0]
        return scores.sum().item(), bool((rows.argmax(-1) == targets).all())

    def _encode(self, text: str, *, whole: bool = True) -> list[int]:
        """`whole`: with what the tokenizer puts around a prompt. Raises ConfigError for a text that is refused."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=whole)
        except InvalidRequest as error:
            raise ConfigError(f"lm_eval: {error}") from None


def evaluate(models: Sequence[EngineLM], task: str, limit: int) -> list[dict[str, tuple[float, bool]]]:
    """Return for each model the figures of a task, or of a group of tasks: value, and whether more is better.

    Raises ConfigError for a task that is not there, or whose data cannot be had.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager()
    found = []
    for model in models:
        try:
            done = simple_evaluate(
                model, tasks=[task], limit=limit, bootstrap_iters=0, log_samples=False, task_manager=manager
            )
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # the library's tasks, and those that load their data, raise anything
            raise ConfigError(f"lm_eval:{task}: {type(error).__name__}: {error}") from None
        found.append(_figures(done, task))
    return found


def _figures(done: dict[str, Any], task: str) -> dict[str, tuple[float, bool]]:
    """Return the figures of the task that was asked for, not those of its parts, which few samples decide."""
    results, better = done["results"], done["higher_is_better"]
    name = task if task in results else next(iter(results))
    figures = {}
    for key, value in results[name].items():
        metric, _, filtered = key.partition(",")
        is_figure = isinstance(value, int | float) and not metric.endswith("_stderr") and metric in better[name]
        if is_figure and math.isfinite(value):
            figures[metric if filtered in ("", _NO_FILTER) else f"{metric}.{filtered}"] = (
                float(value),
                bool(better[name][metric]),
            )
    if not figures:
        raise ConfigError(f"lm_eval:{task}: no finite figures among {', '.join(map(str, results[name]))[:200]}")
    return figures
