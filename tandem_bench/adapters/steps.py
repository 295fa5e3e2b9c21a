"""What adapters cost a decode step: a batch in which every row has another one, all have the same, and none has any.

Turns of all three alternate on one engine, since a machine's speed drifts; each turn counts by its median step, and
ratios are taken within a round.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from engine.kv_storage.paged_cache import TORCH_DTYPES
from tandem.adapters.files import read_adapter_content
from tandem_bench.adapters.files import packed_bytes, write_adapters
from tandem_bench.engine.rig import Rig, assemble_from
from tandem_bench.engine.workload import Job
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure

MAX_RATIO = 1.25
NUM_ROWS = 16
_PROMPT_TOKENS, _STEPS = 32, 24
_NONE, _SAME, _EACH = "without adapters", "one adapter in all rows", f"{NUM_ROWS} adapters in {NUM_ROWS} rows"


def measure_steps(model: str, dtype: str, *, num_threads: int, rounds: int, err: Console) -> list[Row]:
    """Time the steps. Raises CannotMeasure."""
    with TemporaryDirectory(prefix="tandem-adapters-") as folder:
        paths = list(write_adapters(model, Path(folder), NUM_ROWS).values())
        overrides: dict[str, Any] = {"model.path": model, "model.dtype": dtype, "model.adapter_folder": folder}
        overrides |= {
            "engine.num_threads": num_threads,
            "engine.device": "cpu",
            "engine.max_running_requests": NUM_ROWS,
        }
        parts = assemble_from(overrides)
        if parts.adapters is None:
            raise CannotMeasure("this engine takes no adapters")
        for slot, path in enumerate(paths):  # the engine's thread does not run yet
            parts.adapters.put(slot, parts.adapters.read(read_adapter_content(path, max_bytes=1 << 30)))
        rng = Random(1)
        size = parts.model.vocab_size
        prompts = tuple(tuple(rng.randrange(16, size) for _ in range(_PROMPT_TOKENS)) for _ in range(NUM_ROWS))
        slots: Mapping[str, tuple[int, ...]] = {
            _NONE: (-1,) * NUM_ROWS,
            _SAME: (0,) * NUM_ROWS,
            _EACH: tuple(range(NUM_ROWS)),
        }
        steps_ms: dict[str, list[float]] = {way: [] for way in slots}
        with Rig(parts) as rig:
            for number in range(rounds + 1):  # the first one warms everything up
                err.print(f"[dim]round {number} of {rounds} ...[/dim]")
                for way, of_rows in slots.items():
                    outcome = rig.run(Job(prompts=prompts, num_tokens=_STEPS, adapter_slots=of_rows))
                    if number and outcome.steps is not None:
                        steps_ms[way].append(1e3 * median(outcome.steps.decode_steps_s))
        size_mb = packed_bytes(model, paths[0], TORCH_DTYPES[dtype]) / 1e6
        return [*_rows(steps_ms), figure("memory of one adapter", size_mb, "MB")]


def _rows(steps_ms: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = [figure(f"step of {NUM_ROWS} rows, {way}", median(found), "ms") for way, found in steps_ms.items()]
    for way in (_SAME, _EACH):
        ratios = [one / without for one, without in zip(steps_ms[way], steps_ms[_NONE], strict=True)]
        error = stdev(ratios) / math.sqrt(len(ratios))
        goal = MAX_RATIO if way == _EACH else None
        rows.append(figure(f"step, {way}: ratio to {_NONE}", mean(ratios), "", at_most=goal))
        rows.append(figure(f"step, {way}: standard error of the ratio", error, ""))
    return rows
