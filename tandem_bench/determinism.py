"""The cost of `engine.deterministic`: `python -m tandem_bench.determinism` times steps with and without it.

One thread drives the model's runner without a scheduler, which is the same in both cases: decode steps of several
sequences over a filled cache, and whole prompts, with the same weights. Rounds of both alternate, since the machine's
speed drifts; the fastest step of all rounds counts.
"""

import argparse
import os
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench import report
from tandem_bench.make_model import cached_model
from tandem_bench.report import Row, figure
from tandem_bench.shapes import REFERENCE, SHAPES

WAYS = {"default": False, "deterministic": True}
_BLOCK_SIZE = 16
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    batches: Sequence[int] = (1, 4, 16)
    prompt_tokens: int = 512
    rounds: int = 5
    steps: int = 8
    """Decode steps of each round; one prompt counts as many."""


class Contestant:
    """One way to compute: its model, and a cache filled with as many prompts as the largest batch needs."""

    def __init__(self, folder: Path, options: BackendOptions, plan: Plan) -> None:
        """Load the model. Raises ConfigError when the options are not available here."""
        model = load_model(folder, backend=select_backend(options))
        layout = kv_layout(model.config, fingerprint=model.fingerprint, dtype=options.dtype, block_size=_BLOCK_SIZE)
        blocks_each = -(-(plan.prompt_tokens + 1) // _BLOCK_SIZE)
        cache = PagedKVCache(layout, num_blocks=blocks_each * max(plan.batches), device=options.device)
        self.name = model.backend.name
        self._runner = ModelRunner(model, cache)
        self._runner.record_graphs(
            max_rows=max(plan.batches), max_tokens=max(plan.batches), max_length=plan.prompt_tokens + 1
        )
        self._runner.bind_thread()
        rng = Random("bench:determinism")
        self._requests = [
            _request([rng.randrange(model.config.vocab_size) for _ in range(plan.prompt_tokens + 1)], i, blocks_each)
            for i in range(max(plan.batches))
        ]
        for i in range(len(self._requests)):
            self.prefill(i)

    def prefill(self, number: int = 0) -> float:
        """Return the seconds to compute one prompt in one step, including its first token."""
        request = self._requests[number]
        return self._execute([BatchItem(request=request, start=0, num_tokens=request.num_prompt_tokens, samples=True)])

    def decode(self, batch: int) -> float:
        """Return the seconds of one step in which the first `batch` sequences get a token each."""
        return self._execute(
            [
                BatchItem(request=request, start=request.num_prompt_tokens, num_tokens=1, samples=True)
                for request in self._requests[:batch]
            ]
        )

    def _execute(self, items: list[BatchItem]) -> float:
        started_s = time.perf_counter()
        self._runner.execute(Batch(items=tuple(items)))
        return time.perf_counter() - started_s


def rows(folder: Path, options: Sequence[BackendOptions], plan: Plan) -> list[Row]:
    """Measure both ways, with `options` in the order of WAYS. Raises ConfigError."""
    contestants = [Contestant(folder, each, plan) for each in options]
    prefill_s = [float("inf")] * len(contestants)
    decode_s = {batch: [float("inf")] * len(contestants) for batch in plan.batches}
    for _ in range(plan.rounds):
        for i, contestant in enumerate(contestants):
            prefill_s[i] = min(prefill_s[i], contestant.prefill())
        for batch, best in decode_s.items():
            for i, contestant in enumerate(contestants):
                best[i] = min(best[i], *(contestant.decode(batch) for _ in range(plan.steps)))
    found: list[Row] = []
    for batch, best in decode_s.items():
        name = f"determinism.decode.{batch}"
        found += [figure(f"{name}.{way}", s * 1e3, "ms a step") for way, s in zip(WAYS, best, strict=True)]
        found.append(figure(f"{name}.cost", _cost_percent(*best), "% longer"))
    name = f"determinism.prefill.{plan.prompt_tokens}"
    found += [
        figure(f"{name}.{way}", plan.prompt_tokens / s, "tokens/s") for way, s in zip(WAYS, prefill_s, strict=True)
    ]
    found.append(figure(f"{name}.cost", _cost_percent(*prefill_s), "% longer"))
    return found


def _cost_percent(default_s: float, deterministic_s: float) -> float:
    return 100 * (deterministic_s / default_s - 1)


def _request(tokens: list[int], number: int, num_blocks: int) -> Request:
    """Build a request whose last token is the first generated one: its step is a decode step."""
    return Request(
        request_id=RequestId(f"determinism-{number}"),
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens) - 1,
        params=_GREEDY,
        hash_root=BlockHash(b""),
        block_table=BlockTable(BlockId(number * num_blocks + i) for i in range(num_blocks)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; there are no goals to miss."""
    given = _options(argv)
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    options = [
        BackendOptions(
            device=device,
            dtype=given.dtype,
            deterministic=deterministic,
            num_threads=given.threads,
            binds_threads=given.device == "cpu" and given.threads > 1,
        )
        for deterministic in WAYS.values()
    ]
    folder = cached_model(SHAPES[given.shape], dtype=given.dtype, note=lambda text: print(text, file=sys.stderr))
    found = rows(folder, options, Plan(rounds=given.rounds))
    report.print_table(Console(highlight=False, width=120), found)
    if given.json is not None:
        report.write_json(given.json, found)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.determinism", description="Measure the cost of determinism."
    )
    parser.add_argument("--shape", choices=list(SHAPES), default=REFERENCE)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=Plan().rounds, help="rounds of each way, alternating")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
