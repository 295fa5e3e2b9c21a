"""`python -m tandem_bench spine`: parity, start-up, latency and quality of the whole cluster, in one run.

None of this is a test of time: figures vary with the machine and its other load.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from tandem.model_path import BUILTIN, model_directory
from tandem_bench.errors import EvaluationFailed
from tandem_bench.prompts import Prompt, mixed_prompts
from tandem_bench.report import Row, read_json
from tandem_bench.spine import logits, parity, speed
from tandem_bench.spine.sittings import IN_BATCHES, PASSES, Exam, Pass


def silence() -> None:
    """Disable progress bars in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load(model: Path, dtype: str) -> Any:
    """Load the model with transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: Prompt, num_tokens: int) -> tuple[int, ...]:
    """Return the greedy continuation, with end tokens like any others.

    This is a loop of our own, as transformers' `generate` would stop at, or suppress, the end token.
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
    """Return one answer per prompt, computed on one thread: two that share a busy core wait for each other."""
    torch.set_num_threads(1)
    loaded = load(model, dtype)
    return [greedy(loaded, prompt, num_tokens) for prompt in prompts]


async def rows(model: Path, *, samples: int, lengths: Sequence[int]) -> list[Row]:
    """Measure perplexity, needles and JSON objects. Raises EvaluationFailed."""
    with TemporaryDirectory(prefix="tandem-bench-") as folder:
        file = Path(folder) / "gates.json"
        command = ["training.evaluate", "--model", str(model), "--samples", str(samples), "--json", str(file)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            "--lengths",
            *map(str, lengths),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            raise EvaluationFailed(errors.decode(errors="replace")[-2000:])
        return [_named(row) for row in read_json(file)]


def _named(row: Row) -> Row:
    goal = None if row.met is None else row.goal
    return Row(name=f"model.{row.name}", value=row.value, unit=row.unit, goal=goal, met=row.met)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Amount of measuring for each figure."""

    num_prompts: int = 40
    num_tokens: int = 64
    chunks_alone: tuple[int, ...] = (64,)
    """Chunk sizes at which prompts also run alone, which takes longest."""
    chunks_in_batches: tuple[int, ...] = (16, 64, 512)
    models_each: int = 4
    starts: int = 3
    modes: tuple[str, ...] = speed.MODES
    concurrencies: tuple[int, ...] = (1, 8)
    requests_each: int = 12
    gate_samples: int = 200
    gate_lengths: tuple[int, ...] = (512,)

    @classmethod
    def full(cls) -> "Scale":
        """Return every combination of mode, chunk size, prefix and batching."""
        return cls(chunks_alone=(16, 64, 512), gate_lengths=(512, 1024))

    @classmethod
    def quick(cls) -> "Scale":
        return cls(
            num_prompts=8,
            num_tokens=24,
            chunks_alone=(),
            chunks_in_batches=(64,),
            models_each=1,
            starts=1,
            modes=("shm",),
            concurrencies=(1,),
            requests_each=4,
            gate_samples=60,
            gate_lengths=(512,),
        )

    def passes(self) -> dict[int, tuple[Pass, ...]]:
        """Return the passes of a cluster with each chunk size."""
        return {chunk: PASSES if chunk in self.chunks_alone else IN_BATCHES for chunk in self.chunks_in_batches}


async def measure(scale: Scale, parts: Collection[str], console: Console) -> AsyncIterator[list[Row]]:
    """Yield the figures of the requested parts, part by part; progress goes to `console`. Raises CannotMeasure."""
    silence()
    model = model_directory(BUILTIN)
    exam = Exam(prompts=mixed_prompts(model, scale.num_prompts), num_tokens=scale.num_tokens)

    def note(text: str) -> None:
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)

    if "logits" in parts:
        note("logits: random models")
        yield logits.rows(scale.models_each)
    if "gates" in parts:
        note("gates: the built-in model")
        yield await rows(model, samples=scale.gate_samples, lengths=scale.gate_lengths)
    if "startup" in parts:
        note("start-up")
        yield await speed.startup_rows(exam.prompts[0], scale.starts)
    if "speed" in parts:
        note("latency and throughput")
        yield await speed.latency_rows(
            model, scale.modes, concurrencies=scale.concurrencies, requests_each=scale.requests_each
        )
    if "parity" in parts or "bf16" in parts:
        note("reference: transformers")
        fp32 = answers(model, exam.prompts, exam.num_tokens, dtype="float32")
    if "parity" in parts:
        yield await parity.cluster_rows(exam, fp32, scale.passes(), note)
    if "bf16" in parts:
        bf16 = answers(model, exam.prompts, exam.num_tokens, dtype="bfloat16")
        yield await parity.half_precision_rows(exam, fp32, bf16, note)
