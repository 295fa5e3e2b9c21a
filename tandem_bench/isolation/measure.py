"""All of `python -m tandem_bench isolation`: what the time to first token tells one tenant of another's prompts.

An attacker with a key of its own guesses prefixes, and takes a fast answer for a prefix that the victim has sent. In
each round the victim sends some new prompts; then the attacker sends these and as many that nobody has sent, one at a
time and in random order, so that only the content differs. The control is the same with the victim's own key, where a
guess must succeed: it shows that this cluster on this machine could tell.
"""

import argparse
import json
import secrets
import time
from collections.abc import Mapping
from random import Random
from typing import Any

import httpx
from rich.console import Console

from tandem_bench import stories
from tandem_bench.clusters import Setup, running
from tandem_bench.errors import RequestFailed
from tandem_bench.isolation.separation import MAX_OFF, Probe, Separation, leak_rows, median_ms
from tandem_bench.report import Row, figure, print_table

MIN_CONTROL = 0.9
_ROUND = 10
"""Probes in a round; every other one of a prefix that was sent."""
_PROMPT_CHARS = 4000
"""Long enough that computing a prompt stands out from what else a busy machine does."""
_SHOWN_EVERY = 200
_TIMEOUT_S = 120.0


def setup(keys: Mapping[str, str]) -> Setup:
    """Build the cluster: one prefill worker, two decode workers, and a key for each tenant."""
    entries = [{"key": key, "tenant": tenant} for tenant, key in keys.items()]
    return Setup(
        mode="shm",
        num_threads=1,
        router={"api_keys": entries, "operator_access": {"metrics": "open"}},
        more={"decode": {"replicas": 2}, "log_level": "warning"},
    )


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows`. Raises RequestFailed."""
    keys = {tenant: secrets.token_urlsafe(24) for tenant in ("victim", "attacker")}
    rng = Random(options.seed)
    try:
        async with running(setup(keys)) as cluster, Prober(cluster.url, rng) as prober:
            err.print("[dim]the control ...[/dim]")
            await prober.probe(_ROUND, victim=keys["victim"], attacker=keys["victim"])  # everything is warm
            control = await prober.probe(options.control, victim=keys["victim"], attacker=keys["victim"])
            rows += _rows("the same tenant", control)
            rows.append(figure("the same tenant: AUC", _auc(control), "", at_least=MIN_CONTROL))
            err.print("[dim]the other tenant ...[/dim]")
            probes: list[Probe] = []
            most = options.probes
            while len(probes) < most:
                some = min(_SHOWN_EVERY, most - len(probes))
                probes += await prober.probe(some, victim=keys["victim"], attacker=keys["attacker"])
                err.print(f"[dim]{len(probes)} probes: AUC {_auc(probes):.3f}[/dim]")
                if len(probes) == options.probes and Separation.from_probes(probes).off > MAX_OFF:
                    # One run in fifty is that far off by chance alone; twice as many probes are rarely so.
                    most *= 2
            rows += _rows("another tenant", probes)
            rows += leak_rows(probes)
    finally:
        print_table(out, rows)


def _rows(name: str, probes: list[Probe]) -> list[Row]:
    return [
        figure(f"{name}: probes", len(probes), ""),
        figure(f"{name}: TTFT of prefixes that were sent", median_ms(probes, was_sent=True), "ms"),
        figure(f"{name}: TTFT of prefixes that were not", median_ms(probes, was_sent=False), "ms"),
    ]


def _auc(probes: list[Probe]) -> float:
    return Separation.from_probes(probes).auc


class Prober:
    """Sends prompts that nobody has sent before, with the key of whom it is told; an async context manager."""

    def __init__(self, url: str, rng: Random) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_TIMEOUT_S), trust_env=False)
        self._rng = rng
        self._number = 0

    async def __aenter__(self) -> "Prober":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def probe(self, count: int, *, victim: str, attacker: str) -> list[Probe]:
        """Return so many probes, half of them of prefixes that the victim has sent. Raises RequestFailed."""
        probes: list[Probe] = []
        while len(probes) < count:
            trials = [(self._prompt(), number % 2 == 0) for number in range(min(_ROUND, count - len(probes)))]
            for prompt, is_sent in trials:
                if is_sent:
                    await self._send(prompt, victim)
            self._rng.shuffle(trials)
            for prompt, is_sent in trials:
                ttft_s, cached_tokens = await self._send(prompt, attacker)
                probes.append(Probe(ttft_s, is_sent, cached_tokens))
        return probes

    def _prompt(self) -> str:
        """Make a text that differs from every other one from its beginning."""
        self._number += 1
        text = f"{self._rng.randrange(1 << 32):08x} {self._number}: "
        while len(text) < _PROMPT_CHARS:
            text += stories.tell(self._rng).text
        return text[:_PROMPT_CHARS]

    async def _send(self, prompt: str, key: str) -> tuple[float, int]:
        """Return the time to first token and the number of cached tokens that the answer tells."""
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {key}"}
        first_s, usage = None, None
        sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise RequestFailed((await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first_s = time.perf_counter() if first_s is None else first_s
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RequestFailed(str(chunk["error"].get("message")))
                    usage = chunk.get("usage") or usage
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from None
        if first_s is None or usage is None:
            raise RequestFailed("an answer without a token or without its usage")
        return first_s - sent_s, int(usage["prompt_tokens_details"]["cached_tokens"])
