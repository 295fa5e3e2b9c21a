"""Sources of a worker's latency: a profile in JSON, or a public table fitted to the same five figures.

- A name of `profiles/`, or a path to such a file: the fields of `StepLatency`.
- `PATH.csv#MODEL/HARDWARE/TP`: Splitwise's measurements (Patel et al., ISCA 2024), least squares over its rows.
- `PATH.json#MODEL/TP`: DistServe's own fits (Zhong et al., OSDI 2024), those for small batches.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from cluster.simulator.inputs.latency import StepLatency, StepWork
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError

_MAX_FILE_BYTES = 64 << 20
PROFILES = Path(__file__).parents[1] / "profiles"
KV_BYTES_PER_TOKEN = {
    "llama2-70b": 2 * 80 * 8 * 128 * 2,
    "bloom-176b": 2 * 70 * 112 * 128 * 2,
    "facebook/opt-13b": 2 * 40 * 40 * 128 * 2,
    "facebook/opt-66b": 2 * 64 * 72 * 128 * 2,
    "facebook/opt-175b": 2 * 96 * 96 * 128 * 2,
}
"""KV bytes per token over all ranks, at 16 bits: keys and values x layers x KV heads x head size x bytes."""


def load_latency(text: str) -> StepLatency:
    """Load a latency as described above. ConfigError if it does not exist or cannot be read."""
    where, _, row = text.partition("#")
    path = Path(where)
    if not row and path.suffix != ".json":
        path = PROFILES / f"{where}.json"
    try:
        if not row:
            return _profile(path)
        return _splitwise(path, row) if path.suffix == ".csv" else _distserve(path, row)
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        known = ", ".join(sorted(profile.stem for profile in PROFILES.glob("*.json")))
        raise ConfigError(f"no latency profile in {text!r} ({error}); known by name: {known}") from error


def _profile(path: Path) -> StepLatency:
    raw: dict[str, Any] = json.loads(read_regular_text(path))
    known = {field.name for field in fields(StepLatency)}
    if unknown := raw.keys() - known:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    return StepLatency(**raw)


def _splitwise(path: Path, row: str) -> StepLatency:
    model, hardware, tp = row.rsplit("/", 2)
    with io.StringIO(read_regular_text(path, max_bytes=_MAX_FILE_BYTES), newline="") as lines:
        rows = [
            {name: float(r[name]) for name in ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")}
            for r in csv.DictReader(lines)
            if (r["model"], r["hardware"], r["tensor_parallel"]) == (model, hardware, tp)
        ]
    if not rows:
        raise ValueError(f"no row of {row}")
    prompts = [(r["prompt_size"] * r["batch_size"], r["prompt_size"] ** 2 / 2 * r["batch_size"]) for r in rows]
    prefill = _fit([(1.0, tokens, pairs) for tokens, pairs in prompts], [r["prompt_time"] / 1e3 for r in rows])
    contexts = [r["batch_size"] * (r["prompt_size"] + r["token_size"] / 2) for r in rows]
    decode = _fit(
        [(1.0, r["batch_size"], context) for r, context in zip(rows, contexts, strict=True)],
        [r["token_time"] / 1e3 for r in rows],
    )
    return StepLatency(
        step_s=decode[0],
        # A prefill's fixed cost beyond a decode's is spread over a chunk of the usual size.
        prompt_token_s=prefill[1] + max(0.0, prefill[0] - decode[0]) / 2048,
        pair_s=prefill[2],
        row_s=decode[1],
        context_token_s=decode[2],
        kv_bytes_per_token=KV_BYTES_PER_TOKEN[model],
        source=f"{path.name}: {row}, least squares over {len(rows)} rows",
    )


def _distserve(path: Path, row: str) -> StepLatency:
    model, tp = row.rsplit("/", 1)
    fit = json.loads(read_regular_text(path, max_bytes=_MAX_FILE_BYTES))[model][tp]
    (fixed, per_token, per_square), (step, per_context, per_row) = fit["prefill"], fit["decoding_smallbs"]
    return StepLatency(
        step_s=step / 1e3,
        prompt_token_s=per_token / 1e3 + max(0.0, fixed - step) / 1e3 / 2048,
        pair_s=2 * per_square / 1e3,
        row_s=per_row / 1e3,
        context_token_s=per_context / 1e3,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN[model],
        source=f"{path.name}: {row}, fit for fewer than {fit['decoding_large_small_bs_threshold']} rows",
    )


def fit_steps(works: Sequence[StepWork], seconds: Sequence[float]) -> StepLatency:
    """Fit a latency to measured steps; each step weighs the same whatever its duration."""
    rows = [[value / took for value in (1, *work)] for work, took in zip(works, seconds, strict=True)]
    step_s, prompt_token_s, pair_s, row_s, context_token_s = _fit(rows, [1.0] * len(rows))
    return StepLatency(
        step_s=step_s, prompt_token_s=prompt_token_s, pair_s=pair_s, row_s=row_s, context_token_s=context_token_s
    )


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit by least squares without negative terms: the most negative one is dropped until none is left."""
    matrix, target = np.array(rows), np.array(seconds)
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        worst = int(found.argmin())
        if found[worst] >= 0.0 or len(kept) == 1:
            break
        del kept[worst]
    values = [0.0] * matrix.shape[1]
    for index, value in zip(kept, found, strict=True):
        values[index] = max(0.0, float(value))
    return values
