"""What two models expect of the same tokens: perplexities, KL divergence, agreement."""

import math
from collections.abc import Iterable, Sequence
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from router.text.tokenizer import Tokenizer
from tandem_bench import stories
from tandem_bench.quality.engine_forward import EngineForward
from worker.decisions.quality_gate import GateWindow, perplexity_of

WINDOW = 512
"""Tokens that are scored with a context of their own."""
_GATE_DIGITS = 6
_ROWS = 64
"""Rows of the vocabulary's size that are compared at once, which bounds the memory of large vocabularies."""


def text_windows(tokenizer: Tokenizer, ids: Sequence[int], num: int) -> list[list[int]]:
    """Cut a text's tokens into at most `num` windows, evenly spaced, each after what the tokenizer puts before a
    prompt. There are none in fewer than two tokens.
    """
    before = prompt_beginning(tokenizer)
    size = WINDOW - len(before)
    starts: Sequence[int] = range(0, len(ids) - 1, size)
    if len(starts) > num:
        starts = [starts[i * len(starts) // num] for i in range(num)]
    return [[*before, *ids[start : start + size]] for start in starts]


def story_windows(tokenizer: Tokenizer, num: int) -> list[list[int]]:
    """Make `num` full windows of generated stories, for where no text is given."""
    before = prompt_beginning(tokenizer)
    windows = []
    for i in range(num):
        rng, ids = Random(f"quality:story:{i}"), list(before)
        while len(ids) < WINDOW:
            ids += tokenizer.encode(f"{stories.tell(rng).text}\n", add_special_tokens=False)
        windows.append(ids[:WINDOW])
    return windows


def prompt_beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer itself puts before every prompt, such as the beginning of a sequence."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


@torch.inference_mode()
def expectations(base: EngineForward, ids: list[int]) -> GateWindow:
    """Return what a base expects in the place of each token of a window but the first."""
    targets, logits = torch.tensor(ids[1:]), base(ids)
    logprobs, top_ids = [], []
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, min(start + _ROWS, len(targets)))
        expected = logits[rows].double().log_softmax(-1)
        logprobs += expected.gather(1, targets[rows, None])[:, 0].tolist()
        top_ids += expected.argmax(-1).tolist()
    rounded = (min(0.0, round(one, _GATE_DIGITS)) for one in logprobs)
    return GateWindow(token_ids=tuple(ids), logprobs=tuple(rounded), top_ids=tuple(top_ids))


class TextScores:
    """Sums over all tokens but each window's first, of a base and of a model that is compared with it."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._base_nats = 0.0
        self._nats = 0.0
        self._num_agreeing = 0
        self._divergences: list[Tensor] = []

    @torch.inference_mode()
    def add(self, base: EngineForward, model: EngineForward, windows: Iterable[list[int]]) -> None:
        """Score windows by both models, which must have the same vocabulary."""
        for ids in windows:
            targets = torch.tensor(ids[1:])
            base_logits, logits = base(ids), model(ids)
            for start in range(0, len(targets), _ROWS):
                rows = slice(start, min(start + _ROWS, len(targets)))
                self._add_rows(base_logits[rows], logits[rows], targets[rows])

    def _add_rows(self, base_logits: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add logits `[num_tokens, vocab_size]` after the tokens before `targets`, `[num_tokens]`."""
        expected, found = base_logits.double().log_softmax(-1), logits.double().log_softmax(-1)
        self._base_nats += F.nll_loss(expected, targets, reduction="sum").item()
        self._nats += F.nll_loss(found, targets, reduction="sum").item()
        self._divergences.append((expected.exp() * (expected - found)).sum(-1))
        self._num_agreeing += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.num_tokens += len(targets)

    @property
    def base_perplexity(self) -> float:
        """Perplexity of the base, per token."""
        return perplexity_of(self._base_nats / self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity of the model, per token."""
        return perplexity_of(self._nats / self.num_tokens)

    @property
    def mean_divergence(self) -> float:
        """Mean over tokens of KL(base || model), in nats."""
        return torch.cat(self._divergences).mean().item()

    @property
    def p99_divergence(self) -> float:
        """99th percentile over tokens of KL(base || model), in nats."""
        ordered = torch.cat(self._divergences).sort().values
        return ordered[math.ceil(0.99 * len(ordered)) - 1].item()

    @property
    def agreement_percent(self) -> float:
        """Share of tokens after which both expect the same one most."""
        return 100 * self._num_agreeing / self.num_tokens
