"""The parity exam: the same prompts to one cluster, alone and in batches, with a cold and a warm prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_bench.client import Client, Completion
from tandem_bench.clusters import Setup, running
from tandem_bench.prompts import Prompt

BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One way of sending all the prompts."""

    name: str
    concurrency: int
    is_hit: bool = False
    repeats: str | None = None
    """Pass whose prompts this one repeats exactly; a hit without it finds the first half of each prompt."""

    @property
    def salt(self) -> str:
        """Cache salt of the pass: passes share a cache only where intended."""
        return self.repeats or self.name


ALONE_COLD = Pass(name="alone.cold", concurrency=1)
ALONE_HIT = Pass(name="alone.hit", concurrency=1, is_hit=True, repeats="alone.cold")
BATCH_COLD = Pass(name="batch_16.cold", concurrency=BATCH)
BATCH_HIT = Pass(name="batch_16.hit", concurrency=BATCH, is_hit=True)
IN_BATCHES = (BATCH_COLD, BATCH_HIT)
PASSES = (ALONE_COLD, ALONE_HIT, *IN_BATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Prompts, and the length of the answers."""

    prompts: Sequence[Prompt]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    setup: Setup
    answers: dict[Pass, list[Completion]]
    num_requests: int
    """Requests sent, including those that warmed caches."""
    placements: dict[str, int]
    """The router's own count of where prompts were computed, by reason."""
    num_retries: int

    @property
    def num_disaggregated(self) -> int:
        """Requests that went through both pools."""
        return self.placements.get("disaggregated", 0)


async def sit(setup: Setup, exam: Exam, passes: Sequence[Pass]) -> Sitting:
    """Start a cluster, send everything, and stop it. Raises ClusterFailed or RequestFailed."""
    answers: dict[Pass, list[Completion]] = {}
    num_requests = 0
    async with running(setup) as cluster, Client(cluster.url) as client:
        for one in passes:
            if one.is_hit and one.repeats is None:
                halves = [prompt.half() for prompt in exam.prompts]
                await client.complete_all(halves, max_tokens=1, concurrency=one.concurrency, salt=one.salt)
                num_requests += len(halves)
            answers[one] = await client.complete_all(
                exam.prompts, max_tokens=exam.num_tokens, concurrency=one.concurrency, salt=one.salt
            )
            num_requests += len(exam.prompts)
        placements = await client.counts("tandem_placements_total")
        retries = await client.counts("tandem_dispatch_retries_total")
    return Sitting(
        setup=setup,
        answers=answers,
        num_requests=num_requests,
        placements={reason: int(count) for reason, count in placements.items()},
        num_retries=int(sum(retries.values())),
    )


def num_differing(answers: Sequence[Completion], expected: Sequence[tuple[int, ...]]) -> int:
    """Count answers that differ from the expected tokens, including in length."""
    return sum(answer.token_ids != tokens for answer, tokens in zip(answers, expected, strict=True))
