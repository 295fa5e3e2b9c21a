"""Clients of a cluster whose workers die: each sends request after request and checks every response."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.oracle import Oracle
from tests.support.running_cluster import RunningCluster, body

MAX_TOKENS = 24
BOUND_S = 60.0
"""Every request has ended by then, whatever died; by the clock that the clients are given."""
RIGHT = "right tokens"
REFUSED = "status"
RETRY_AFTER_S = 1.0
RETRYABLE = {"RateLimitError", "ServiceUnavailableError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and what follows it, undisturbed."""

    token_ids: Sequence[int]
    answer: Sequence[int]


def known_prompts(oracle: Oracle, count: int, *, seed: int = 0) -> list[Prompt]:
    """Of a few chunks to many."""
    draw = random.Random(seed)
    prompts = [oracle.story(40_000 + 100 * seed + i, draw.randrange(300, 1400)) for i in range(count)]
    return [Prompt(token_ids=ids, answer=oracle.tokens(ids, MAX_TOKENS)) for ids in prompts]


class Clients:
    """Keep so many requests in flight until `stop`."""

    def __init__(
        self,
        cluster: RunningCluster,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        patience: Callable[[], float] | None = None,
    ) -> None:
        """`patience`: the clock of `BOUND_S`; None: `clock`."""
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest_s = 0.0
        self._clock = clock
        self._patience = patience or clock
        self._cluster = cluster
        self._prompts = prompts
        self._draw = random.Random(seed)
        self._serial = 0
        self._stopping = False

    @asynccontextmanager
    async def asking(self, count: int) -> AsyncIterator[None]:
        """Leaving waits for every answer."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._ask_on())
            try:
                yield
            finally:
                self._stopping = True

    async def _ask_on(self) -> None:
        while not self._stopping:
            self._serial += 1
            prompt, num_tokens = self._draw.choice(self._prompts), self._draw.randrange(1, MAX_TOKENS + 1)
            # Mostly a prompt that nobody has computed, sometimes one that some worker may hold the prefix of.
            salt = "known" if self._draw.random() < 0.25 else f"salt {self._serial}"
            started_s = self._clock()
            outcome = await self.ask(prompt, num_tokens, salt)
            self.slowest_s = max(self.slowest_s, self._clock() - started_s)
            self.outcomes[outcome] += 1
            if outcome.startswith(REFUSED):
                await asyncio.sleep(RETRY_AFTER_S)

    async def ask(self, prompt: Prompt, num_tokens: int, salt: str) -> str:
        """How one request ended; what may not be is noted as a problem."""
        answer = asyncio.ensure_future(self._ask(prompt, num_tokens, salt))
        end_s = self._patience() + BOUND_S
        while not answer.done() and self._patience() < end_s:
            await asyncio.wait({answer}, timeout=1.0)
        if answer.done():
            return answer.result()
        answer.cancel()
        return self._problem(f"no end in {BOUND_S:.0f} s")

    async def _ask(self, prompt: Prompt, num_tokens: int, salt: str) -> str:
        got: list[int] = []
        request = body(prompt.token_ids, num_tokens, stream=True, cache_salt=salt)
        try:
            async with self._cluster.http.stream("POST", "/v1/completions", json=request, timeout=None) as response:
                if response.status_code != 200:
                    await response.aread()
                    return self._refused(response)
                error = await _read(response, got)
        except httpx.HTTPError as broken:
            return self._problem(f"{type(broken).__name__} after {len(got)} tokens")
        if got != list(prompt.answer[: len(got)]):
            return self._problem("wrong tokens")
        if error is not None:
            kind = error.get("type")
            problem = f"error event, {kind} ({error.get('code')})"
            return problem if kind in RETRYABLE else self._problem(problem)
        return RIGHT if len(got) == num_tokens else self._problem(f"{len(got)} of {num_tokens} tokens")

    def _refused(self, response: httpx.Response) -> str:
        error = response.json()["error"]
        refusal = f"{REFUSED} {response.status_code}, {error['type']} ({error['code']}: {error['message']})"
        if error["type"] in RETRYABLE and int(response.headers.get("Retry-After", 0)) >= 1:
            return refusal
        return self._problem(refusal)

    def _problem(self, what: str) -> str:
        self.problems.append(what)
        return f"WRONG: {what}"


async def _read(response: httpx.Response, got: list[int]) -> dict[str, Any] | None:
    """The tokens into `got`; the error that ended the stream, if one did."""
    finished = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        if line == "data: [DONE]":
            return None if finished else {"type": "the end without a reason"}
        chunk = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            return chunk["error"]
        for choice in chunk["choices"]:
            got += choice.get("token_ids") or []
            finished = finished or choice["finish_reason"] is not None
    return {"type": "a stream that broke off"}
