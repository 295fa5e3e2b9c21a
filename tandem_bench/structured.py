"""Cost of following a grammar: decode time per token of answers with a structure and without, alternately.

`python -m tandem_bench.structured` starts a cluster of the built-in model, which is the hardest case: a token takes
only a fraction of a millisecond, so the time of a mask shows. Times are measured by the workers.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console

from tandem_bench import report
from tandem_bench.clusters import COLOCATED, Setup, running
from tandem_bench.report import Row, figure

TARGET_PERCENT = 10.0
ANSWER_TOKENS = 256
_PROMPT = [400] * 32
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["fox", "bear", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _ITEM, "minItems": 60, "maxItems": 60}
_STRUCTURES: dict[str, dict[str, Any]] = {
    "none": {"ignore_eos": True},
    "json": {"structured_outputs": {"json": _SCHEMA}},
    "regex": {"structured_outputs": {"regex": "[a-z0-9 ,.]{4000}"}},
}


async def token_ms(http: httpx.AsyncClient, structure: dict[str, Any], *, streams: int, seed: int) -> float:
    """Return the decode time of a token in milliseconds: the median of answers that run together."""
    body = {
        "prompt": _PROMPT,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 1.0,
        "return_token_ids": True,
        **structure,
    }

    async def one(number: int) -> float:
        answer = await http.post("/v1/completions", json=body | {"seed": seed + number})
        answer.raise_for_status()
        reply = answer.json()
        decode_s, num_tokens = float(reply["timing"]["decode_s"]), int(reply["usage"]["completion_tokens"])
        return 1e3 * decode_s / (num_tokens - 1)

    each = await asyncio.gather(*(one(number) for number in range(streams)))
    return float(median(each))


async def measure(rounds: int, batches: Sequence[int]) -> list[Row]:
    """Return the rows for each number of streams."""
    async with (
        running(Setup(mode=COLOCATED)) as cluster,
        httpx.AsyncClient(
            base_url=cluster.url, headers={"X-Tandem-Timing": "1"}, timeout=120.0, trust_env=False
        ) as http,
    ):
        return [row for streams in batches for row in await _compare(http, streams, rounds)]


async def _compare(http: httpx.AsyncClient, streams: int, rounds: int) -> list[Row]:
    for structure in _STRUCTURES.values():
        await token_ms(http, structure, streams=streams, seed=0)
    found: dict[str, list[float]] = {name: [] for name in _STRUCTURES}
    for number in range(rounds):
        for name, structure in _STRUCTURES.items():
            found[name].append(await token_ms(http, structure, streams=streams, seed=1000 * number))
    plain = found["none"]
    rows = [figure(f"structured.{streams}.none", median(plain), "ms/token")]
    for name in list(_STRUCTURES)[1:]:
        more = median(100.0 * (one / base - 1.0) for one, base in zip(found[name], plain, strict=True))
        rows.append(figure(f"structured.{streams}.{name}", more, "%", at_most=TARGET_PERCENT))
    return rows


def main() -> int:
    """Print the table; return 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="tandem_bench.structured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.streams))
    report.print_table(Console(), rows)
    if options.json is not None:
        report.write_json(options.json, rows, about=report.circumstances(["python", "-m", "tandem_bench.structured"]))
    return 1 if report.num_missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
