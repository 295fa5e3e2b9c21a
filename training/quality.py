"""The cost of lower precision: the built-in model's quality gates through our engine, in every way it can compute.

`python -m training.quality` prints perplexity, needles and JSON objects (training/evaluate.py) for each setting,
and for transformers in float32. `tandem eval` measures any model, against another or itself.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tandem.model_path import BUILTIN, model_directory
from tandem_bench import report
from tandem_bench.quality.engine_forward import EngineForward, Precision
from tandem_bench.report import Row
from training import evaluate
from training.evaluate import Forward

SETTINGS: Mapping[str, Precision] = {
    "float32": Precision(dtype="float32"),
    "bfloat16": Precision(dtype="bfloat16"),
    "int8": Precision(dtype="bfloat16", quantization="int8"),
    "int4": Precision(dtype="bfloat16", quantization="int4"),
    "fp8": Precision(dtype="bfloat16", quantization="fp8"),
    "nf4": Precision(dtype="bfloat16", quantization="nf4"),
    "int8-kv": Precision(dtype="bfloat16", kv_dtype="int8"),
    "fp8-kv": Precision(dtype="bfloat16", kv_dtype="fp8_e4m3"),
    "int4-kv": Precision(dtype="bfloat16", kv_dtype="int4"),
    "int8-and-int8-kv": Precision(dtype="bfloat16", quantization="int8", kv_dtype="int8"),
}
TRANSFORMERS = "transformers"


def rows(
    folder: Path, *, settings: Sequence[str], samples: int, lengths: Sequence[int], text: str, num_threads: int
) -> list[Row]:
    """Measure every gate in every setting; the built-in model's guarantees are the goals. Raises ConfigError."""
    found: list[Row] = []
    for name in settings:
        forward: Forward | None = None
        if name != TRANSFORMERS:
            forward = EngineForward(folder, SETTINGS[name], num_threads=num_threads)
        for row in evaluate.evaluate(folder, text, samples, list(lengths), forward):
            goal = None if row.met is None else row.goal
            found.append(Row(name=f"{name}.{row.name}", value=row.value, unit=row.unit, goal=goal, met=row.met))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m training.quality", description="Measure the cost of lower precision."
    )
    every = (TRANSFORMERS, *SETTINGS)
    made.add_argument("--settings", nargs="+", choices=every, default=list(every))
    made.add_argument("--samples", type=int, default=100, help="number of questions and stories of each kind")
    made.add_argument("--lengths", type=int, nargs="+", default=[512], help="prompt lengths of the needle test")
    made.add_argument("--text", type=Path, help="text of the training run; its last 5%% is measured")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def main() -> int:
    """Print the figures; return 1 when a goal is missed."""
    options = parser().parse_args()
    num_threads = os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    found = rows(
        model_directory(BUILTIN),
        settings=options.settings,
        samples=options.samples,
        lengths=options.lengths,
        text=options.text.read_text(encoding="utf-8") if options.text else "",
        num_threads=num_threads,
    )
    report.print_table(Console(highlight=False, width=120), found)
    if options.json is not None:
        report.write_json(options.json, found)
    return 1 if report.num_missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
