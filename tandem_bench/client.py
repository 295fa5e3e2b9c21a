"""A client that streams completions as token ids and records the times."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem_bench.errors import RequestFailed
from tandem_bench.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Answer to one request, and the times of its parts."""

    request_id: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    first_token_s: float
    """Time from sending the request to the first token."""
    gaps_s: tuple[float, ...]
    """Times between two messages with tokens, shared evenly among the tokens of the later one."""
    prefill_s: float
    """Time of computing the prompt, as the worker measured it."""
    transfer_s: float
    """Time of KV transfer not hidden by computation, as the workers measured it."""


class Client:
    """HTTP client of one router; an async context manager."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(120.0), limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        salt: str = "bench",
        temperature: float = 0.0,
        seed: int | None = None,
        model: str | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Completion:
        """Request a completion of full length, greedy by default. Raises RequestFailed.

        `model`: the name of an adapter; None: the served model. `on_tokens` is called with the number of tokens of each
        message as it arrives.
        """
        body = {
            "prompt": prompt.body,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if model is None else {"model": model}),
        }
        try:
            return await self._stream(body, on_tokens)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from None

    async def _stream(self, body: dict[str, Any], on_tokens: Callable[[int], None] | None) -> Completion:
        reader = _Reader(time.monotonic(), on_tokens)
        headers = {"X-Tandem-Timing": "1"}
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RequestFailed((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    reader.read(json.loads(line.removeprefix("data: ")), time.monotonic())
        return reader.completion()

    async def complete_all(
        self, prompts: Sequence[Prompt], *, max_tokens: int, concurrency: int, salt: str = "bench"
    ) -> list[Completion]:
        """Request at most `concurrency` completions at once; return the answers in the prompts' order."""
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> Completion:
            async with gate:
                return await self.complete(prompt, max_tokens=max_tokens, salt=salt)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def counts(self, name: str) -> dict[str, float]:
        """Return a counter of the router by the value of its last label."""
        text = (await self._http.get("/metrics")).text
        return {
            list(sample.labels.values())[-1]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in _samples(family.samples, name)
        }

    async def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples of one router metric that have these labels, with all their labels."""
        text = (await self._http.get("/metrics")).text
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in _samples(family.samples, name)
            if labels.items() <= sample.labels.items()
        ]


def _samples(samples: Iterable[Any], name: str) -> Iterable[Any]:
    return (sample for sample in samples if sample.name == name and sample.labels)


class _Reader:
    """Accumulates the chunks of one stream."""

    def __init__(self, sent_s: float, on_tokens: Callable[[int], None] | None) -> None:
        self._sent_s = sent_s
        self._on_tokens = on_tokens
        self._last_s: float | None = None
        self._first_s = 0.0
        self._tokens: list[int] = []
        self._gaps: list[float] = []
        self._cached_tokens = 0
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._request_id = ""

    def read(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            raise RequestFailed(str(chunk["error"].get("message")))
        self._request_id = chunk["id"]
        for choice in chunk["choices"]:
            self._take(choice.get("token_ids") or [], now_s)
        if usage := chunk.get("usage"):
            self._cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        if timing := chunk.get("timing"):
            self._prefill_s = timing["prefill_s"]
            self._transfer_s = timing["transfer_s"]

    def _take(self, token_ids: list[int], now_s: float) -> None:
        if not token_ids:
            return
        self._tokens += token_ids
        if self._on_tokens is not None:
            self._on_tokens(len(token_ids))
        if self._last_s is None:
            self._first_s = now_s - self._sent_s
        else:
            self._gaps += [(now_s - self._last_s) / len(token_ids)] * len(token_ids)
        self._last_s = now_s

    def completion(self) -> Completion:
        return Completion(
            request_id=self._request_id,
            token_ids=tuple(self._tokens),
            cached_tokens=self._cached_tokens,
            first_token_s=self._first_s,
            gaps_s=tuple(self._gaps),
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
        )
