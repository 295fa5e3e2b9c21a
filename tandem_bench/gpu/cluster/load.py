"""Requests to clusters whose answers are compared: what is asked, and what came of it."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tandem_bench.client import Client, Completion
from tandem_bench.errors import RequestFailed
from tandem_bench.prompts import Prompt, random_prompt

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, without its length."""

    prompt: Prompt
    temperature: float
    seed: int


def questions(rng: Random, count: int, *, lengths: range, vocab_size: int) -> list[Question]:
    """Generate random prompts without a common prefix; every other one is answered by sampling, with a seed."""
    return [
        Question(
            prompt=random_prompt(rng, rng.choice(lengths), vocab_size),
            temperature=float(number % 2),
            seed=rng.randrange(1 << 31),
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Outcome of questions that were asked together."""

    completions: Sequence[Completion | None]
    """In the questions' order; None where a request failed."""
    errors: Sequence[str]
    seconds: float
    """Time from the first request to the last token."""

    @property
    def tokens(self) -> list[Tokens | None]:
        return [None if one is None else one.token_ids for one in self.completions]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(one.token_ids) for one in self._answered) / self.seconds

    @property
    def ttft_s(self) -> float:
        """Median time to first token; 0 without an answer, like the next."""
        return statistics.median([one.first_token_s for one in self._answered] or [0.0])

    @property
    def exposed_s(self) -> float:
        """Mean time of KV transfer that computation did not hide."""
        return statistics.fmean([one.transfer_s for one in self._answered] or [0.0])

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two tokens of one answer."""
        return max((gap for one in self._answered for gap in one.gaps_s), default=0.0)

    @property
    def _answered(self) -> list[Completion]:
        return [one for one in self.completions if one is not None]


def num_different(found: Sequence[Tokens | None], expected: Sequence[Tokens], num_tokens: int) -> int:
    """Count the answers that are not exactly the first `num_tokens` expected ones; requests that failed are no answers.

    `expected` may have more questions and longer answers than were asked for.
    """
    return sum(
        ours is not None and ours != theirs[:num_tokens]
        for ours, theirs in zip(found, expected[: len(found)], strict=True)
    )


async def send_prompts(
    client: Client,
    asked: Sequence[Question],
    *,
    num_tokens: int,
    concurrency: int,
    salt: str,
    on_tokens: Callable[[int], None] | None = None,
) -> Answers:
    """Ask for answers of this length, at most `concurrency` at once.

    `salt` keeps prefixes cached for other salts from being used, so that every prompt is computed and handed over.
    """
    gate = asyncio.Semaphore(concurrency)
    errors: list[str] = []

    async def one(question: Question) -> Completion | None:
        async with gate:
            try:
                return await client.complete(
                    question.prompt,
                    max_tokens=num_tokens,
                    salt=salt,
                    temperature=question.temperature,
                    seed=question.seed,
                    on_tokens=on_tokens,
                )
            except RequestFailed as error:
                errors.append(str(error))
                return None

    started_s = time.monotonic()
    completions = await asyncio.gather(*map(one, asked))
    return Answers(completions=completions, errors=errors, seconds=time.monotonic() - started_s)
