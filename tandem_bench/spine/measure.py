"""`python -m tandem_bench spine`: every figure that issue 2 asks the spine for, in one run.

Nothing here is a test of time: figures vary with the machine and with what else it does.
"""

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from rich.console import Console

from tandem.model_path import BUILTIN, model_directory
from tandem_bench.prompts import mixed_prompts
from tandem_bench.report import Row
from tandem_bench.spine import logits, model_gates, parity, reference, speed
from tandem_bench.spine.sittings import IN_BATCHES, PASSES, Exam, Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of each figure is measured."""

    num_prompts: int = 40
    num_tokens: int = 64
    chunks_alone: tuple[int, ...] = (64,)
    """Chunk sizes of prompts that also run alone, which takes longest."""
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
        """Every combination of mode, chunk size, prefix and company."""
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
        """What a cluster with each chunk size is asked."""
        return {chunk: PASSES if chunk in self.chunks_alone else IN_BATCHES for chunk in self.chunks_in_batches}


async def measure(scale: Scale, parts: Collection[str], console: Console) -> AsyncIterator[list[Row]]:
    """The figures of the wanted parts, part by part; progress goes to `console`. Raises CannotMeasure."""
    reference.silence()
    model = model_directory(BUILTIN)
    exam = Exam(prompts=mixed_prompts(model, scale.num_prompts), num_tokens=scale.num_tokens)

    def note(text: str) -> None:
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)

    if "logits" in parts:
        note("logits: random models")
        yield logits.rows(scale.models_each)
    if "gates" in parts:
        note("gates: the built-in model")
        yield await model_gates.rows(model, samples=scale.gate_samples, lengths=scale.gate_lengths)
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
        fp32 = reference.answers(model, exam.prompts, exam.num_tokens, dtype="float32")
    if "parity" in parts:
        yield await parity.cluster_rows(exam, fp32, scale.passes(), note)
    if "bf16" in parts:
        bf16 = reference.answers(model, exam.prompts, exam.num_tokens, dtype="bfloat16")
        yield await parity.half_precision_rows(exam, fp32, bf16, note)
