"""`python -m cluster.measure_profile FILE`: measures this machine's engine as a latency profile for `tandem simulate`.

The real scheduler and runner compute prompts of several lengths and batches of several sizes and contexts, step by
step. Of equal steps the fastest counts, since a busy machine only adds time; the five figures of a step are fitted to
all of them.
"""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.simulator.inputs.latency import StepLatency, StepWork, work_of
from cluster.simulator.inputs.latency_files import fit_steps
from engine.assembly import EngineParts, assemble
from engine.types.request import Request
from tandem.config.cluster import load
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from worker.engine_spec import engine_spec

_SECRET = "profile-profile-"  # noqa: S105  # a secret that protects no real cache
_ROUNDS = 3
_PROMPTS = (64, 256, 512, 1024)
_ROWS = (1, 4, 16)
_CONTEXTS = (64, 512)
_STEPS = 6
"""Decode steps of each batch; the first ones warm up."""


def measure(overrides: dict[str, Any]) -> StepLatency:
    """Measure the model and engine that `overrides` selects, by dotted configuration names. Raises ConfigError."""
    lone = {"prefill.replicas": 0, "decode.replicas": 1, "secret": _SECRET}
    parts = assemble(engine_spec(load(None, lone | overrides), WorkerRole.DECODE))
    parts.runner.bind_thread()
    fastest: dict[StepWork, float] = {}
    most = parts.config.max_sequence_tokens - _STEPS - 2
    for round_ in range(_ROUNDS):
        for number, (rows, length) in enumerate(_cases(most, parts.config.max_running_requests)):
            for work, seconds in _steps(parts, rows, length, salt=100 * round_ + number):
                fastest[work] = min(seconds, fastest.get(work, seconds))
    latency = fit_steps(list(fastest), list(fastest.values()))
    layout = parts.layout
    num_bytes = layout.worker_block_bytes // layout.block_size
    return replace(latency, kv_bytes_per_token=num_bytes, source=f"measured: {parts.config.max_model_len} context")


def _cases(most: int, max_rows: int) -> Iterator[tuple[int, int]]:
    yield from ((1, length) for length in _PROMPTS if length <= most)
    yield from ((rows, length) for rows in _ROWS for length in _CONTEXTS if length <= most and rows <= max_rows)


def _steps(parts: EngineParts, rows: int, length: int, *, salt: int) -> Iterator[tuple[StepWork, float]]:
    """Yield each step's work and time, for equal requests whose prompts share nothing."""
    scheduler, vocab = parts.scheduler, parts.model.vocab_size
    for row in range(rows):
        tokens = array("i", ((7919 * (salt + 1) + 104_729 * row + 31 * i) % vocab for i in range(length)))
        scheduler.add(
            Request(
                request_id=RequestId(f"{salt}-{row}"),
                token_ids=tokens,
                num_prompt_tokens=length,
                params=SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True),
                hash_root=root_hash(secret=_SECRET.encode(), model_fingerprint=f"{salt}-{row}"),
            )
        )
    while (batch := scheduler.schedule(0.0)) is not None:
        started_s = time.perf_counter()
        tokens_out = parts.runner.launch(batch, None).tokens()
        seconds = time.perf_counter() - started_s
        yield work_of(batch.items), seconds
        scheduler.commit(batch, tokens_out)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cluster.measure_profile", description=__doc__)
    made.add_argument("file", type=Path)
    made.add_argument("--model", help="directory in Hugging Face layout; default: the built-in model")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--threads", type=int)
    return made


def main() -> int:
    """Measure and write the file."""
    options = parser().parse_args()
    overrides: dict[str, Any] = {"model.path": options.model, "model.dtype": options.dtype}
    if options.threads is not None:
        overrides["engine.num_threads"] = options.threads
    latency = measure(overrides)
    name = Path(options.model).name if options.model else "the built-in model"
    latency = replace(latency, source=f"python -m cluster.measure_profile: {name}, {options.dtype}, on a CPU")
    options.file.write_text(json.dumps(asdict(latency), indent=2) + "\n", encoding="utf-8")
    print(latency)
    return 0


if __name__ == "__main__":
    sys.exit(main())
