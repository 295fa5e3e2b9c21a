"""Share of a long prompt's transfer that is not hidden by its computation: real workers, over tcp.

The workers measure the phases themselves (PhaseTimes): `prefill_s` is the computation, `transfer_s` is the time from
the last computed token to the commit. The same prompts go through a cluster that computes them in chunks, and so sends
while it computes, and through one that computes them at once, so that all of the KV is sent afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from tandem_bench.client import Client, Completion
from tandem_bench.clusters import Setup, running
from tandem_bench.make_model import cached_model
from tandem_bench.prompts import random_prompt
from tandem_bench.report import Row, figure
from tandem_bench.shapes import REFERENCE, SHAPES

EXPOSED_GOAL_PERCENT = 5.0
PROMPT_TOKENS = 2048
_PIECE_TOKENS = 512
_NUM_BLOCKS = 512
_PROMPTS = 5
_ANSWER_TOKENS = 2
_BAR = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    prefill_s: float
    exposed_s: float
    first_token_s: float

    @classmethod
    def from_answer(cls, answer: Completion) -> "Phases":
        """Build from what the workers and the client measured."""
        return cls(prefill_s=answer.prefill_s, exposed_s=answer.transfer_s, first_token_s=answer.first_token_s)


async def rows(note: Callable[[str], None], *, shape: str = REFERENCE, prompt_tokens: int = PROMPT_TOKENS) -> list[Row]:
    """Measure both ways, one after the other; `note` also gets the time line of each prompt. Raises CannotMeasure."""
    model = cached_model(SHAPES[shape], note=note)
    found: dict[str, list[Phases]] = {}
    for way, chunk_tokens in (("meanwhile", _PIECE_TOKENS), ("after", prompt_tokens)):
        setup = Setup(
            mode="tcp",
            dtype="bfloat16",
            prefill_chunk_tokens=chunk_tokens,
            local_prefill_tokens=0,
            model={"path": str(model), "max_model_len": prompt_tokens + 64},
            engine={"num_blocks": _NUM_BLOCKS},
        )
        rng = Random("bench:transfer:overlap")
        async with running(setup) as cluster, Client(cluster.url) as client:
            answers = [
                await client.complete(
                    random_prompt(rng, prompt_tokens, SHAPES[shape].vocab_size), max_tokens=_ANSWER_TOKENS
                )
                for _ in range(1 + _PROMPTS)
            ]
        # The first prompt warms up what is initialized lazily.
        found[way] = [Phases.from_answer(answer) for answer in answers[1:]]
        for phases in found[way]:
            note(f"{way:>9} {time_line(phases)}")
    return exposed_rows(found["meanwhile"], found["after"], judged=prompt_tokens == PROMPT_TOKENS)


def exposed_rows(meanwhile: Sequence[Phases], after: Sequence[Phases], *, judged: bool) -> list[Row]:
    """Return medians over prompts; the goal applies to sending during computation."""
    result: list[Row] = []
    for way, seen in (("meanwhile", meanwhile), ("after", after)):
        share = median(100 * phases.exposed_s / phases.prefill_s for phases in seen)
        goal = EXPOSED_GOAL_PERCENT if judged and way == "meanwhile" else None
        result += [
            figure(f"overlap.{way}.prefill", 1000 * median(phases.prefill_s for phases in seen), "ms of computing"),
            figure(f"overlap.{way}.exposed", 1000 * median(phases.exposed_s for phases in seen), "ms to commit"),
            figure(f"overlap.{way}.share", share, "% of the prefill time is exposed transfer", at_most=goal),
            figure(f"overlap.{way}.ttft", 1000 * median(phases.first_token_s for phases in seen), "ms"),
        ]
    return result


def time_line(phases: Phases) -> str:
    """Draw computation as `=` and transfer after it as `>`, to scale."""
    total_s = phases.prefill_s + phases.exposed_s
    num_exposed = round(_BAR * phases.exposed_s / total_s)
    bar = "=" * (_BAR - num_exposed) + ">" * num_exposed
    return f"|{bar}| {1000 * phases.prefill_s:.0f} ms computed, {1000 * phases.exposed_s:.1f} ms exposed"
