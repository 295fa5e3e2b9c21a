"""What transformers says to the same prompts: one prompt at a time, greedily."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandem_bench.prompts import Prompt


def silence() -> None:
    """No progress bars among the figures, in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load(model: Path, dtype: str) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: Prompt, num_tokens: int) -> tuple[int, ...]:
    """The likeliest continuation; end tokens are tokens like others.

    A loop of our own: `generate` would stop at, or suppress, the end token.
    """
    tokens: list[int] = []
    step = torch.tensor([prompt.token_ids])
    cache = None
    while len(tokens) < num_tokens:
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tuple(tokens)


def answers(model: Path, prompts: Sequence[Prompt], num_tokens: int, *, dtype: str) -> list[tuple[int, ...]]:
    """One answer per prompt, on one thread: two that share a busy core wait for each other."""
    torch.set_num_threads(1)
    loaded = load(model, dtype)
    return [greedy(loaded, prompt, num_tokens) for prompt in prompts]
