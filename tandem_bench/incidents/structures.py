"""Clients that request a JSON object, check it, and retry if it is invalid."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from tandem_bench.errors import RequestFailed

_CLIENTS = 4
_MOST_TRIES = 3
_PROMPT = [400] * 32
_FIELDS = {"name": {"type": "string"}, "notes": {"type": "array", "items": {"type": "string"}, "minItems": 2}}
_BOUNDED = {
    "name": {"type": "string", "maxLength": 16},
    "notes": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 2, "maxItems": 3},
}


@dataclass(slots=True)
class _Tally:
    whole: int = 0
    given_up: int = 0
    tries: int = 0
    tokens: int = 0


async def unbounded(url: str, seconds: float) -> Mapping[str, float]:
    """Use a schema with unbounded strings and arrays, and 48 tokens for the answer."""
    return await _ask(url, seconds, _FIELDS, max_tokens=48)


async def bounded(url: str, seconds: float) -> Mapping[str, float]:
    """Use the same fields with bounds, and tokens for the longest answer that they allow."""
    return await _ask(url, seconds, _BOUNDED, max_tokens=256)


async def _ask(url: str, seconds: float, fields: dict[str, Any], *, max_tokens: int) -> Mapping[str, float]:
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    body = {"prompt": _PROMPT, "max_tokens": max_tokens, "structured_outputs": {"json": schema}}
    tally, end_s = _Tally(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        for number in range(_CLIENTS):
            tasks.create_task(_client(http, body, tally, end_s, seed=1_000_000 * number))
    return {
        "whole objects": float(tally.whole),
        "given up after three tries": float(tally.given_up),
        "requests": float(tally.tries),
        "tokens for each whole object": tally.tokens / max(1, tally.whole),
    }


async def _client(http: httpx.AsyncClient, body: dict[str, Any], tally: _Tally, end_s: float, *, seed: int) -> None:
    while time.monotonic() < end_s:
        for _ in range(_MOST_TRIES):
            seed += 1
            answer = await http.post("/v1/completions", json=body | {"seed": seed})
            if answer.status_code != httpx.codes.OK:
                raise RequestFailed(answer.text)
            completion = answer.json()
            tally.tries += 1
            tally.tokens += completion["usage"]["completion_tokens"]
            with suppress(ValueError):
                json.loads(completion["choices"][0]["text"])
                tally.whole += 1
                break
        else:
            tally.given_up += 1
