"""Everything that only a GPU machine can measure, in one command: `python tandem_bench/gpu_suite.py --json gpu.json`.

Parity of kernels and engine, the machine's ceilings, the speed of an 8B-shaped random model relative to them, and
peers; under eight minutes on an H200. Needs torch, triton, numpy and safetensors, and transformers for parity and its
own speed; no model, no network, no installation of this package. Every part runs in a process of its own within a
budget of its own (tandem_bench.gpu.isolation): a failure is reported and the rest continues.

`--only cluster` is a run of its own, of up to four minutes: a whole cluster on one GPU, with workers killed. It needs
this package's own dependencies as well.

`--device cpu --shape tiny` runs all of it with small sizes and kernels in Triton's interpreter, to check that it works.

Exit code: 0, or 1 when a goal was missed, or 2 when a part failed or had no time.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a file: the directory above contains the packages, and the file's own directory must not shadow modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tandem_bench import report
from tandem_bench.gpu.parts import APART, PARTS, Part

if TYPE_CHECKING:
    from tandem_bench.gpu.isolation import Result
    from tandem_bench.gpu.stage import Stage

LIMIT_S = 477.0
"""Time limit within the eight minutes: the parts' budgets, and the start and end of their processes."""
EXIT_MISSED, EXIT_INCOMPLETE = 1, 2
_VERDICTS = {True: "met", False: "NOT MET", None: ""}
_FORK_SAFE = ("numpy", "torch", "triton")
_MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite, and return the process's exit code."""
    given = _options(argv)
    # Set before anything imports triton, which decides at import whether kernels are interpreted.
    _prepare_environment(given.device)
    from tandem_bench.gpu.isolation import Workshop
    from tandem_bench.gpu.stage import Stage

    started_s = time.monotonic()
    # Importing model code may query GPUs, which the process that others are forked from must not do.
    workshop = Workshop(_FORK_SAFE + (_MODELS if given.device == "cpu" else ()))
    workshop.warm()
    stage = Stage(device=given.device, shape=given.shape, seed=given.seed, deadline_s=started_s + given.limit_s)
    results: list[Result] = []
    for part in _chosen(given.only):
        results.append(workshop.run(part, stage))
        print(describe(results[-1]), flush=True)
        if given.json is not None:
            write_json(given.json, results, stage=stage, seconds=time.monotonic() - started_s)
    print(verdict(results, time.monotonic() - started_s))
    if not all(result.is_complete for result in results):
        return EXIT_INCOMPLETE
    return EXIT_MISSED if num_missed(results) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite", description="Measure what only a GPU machine can.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default=None, help="random model: tiny, 0.5b, 1b, 8b; default: 8b, on a CPU tiny")
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of parts, or prefixes of them")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of the whole suite, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found to this file as well")
    given = parser.parse_args(argv)
    given.shape = given.shape or ("8b" if given.device == "cuda" else "tiny")
    if given.list:
        for part in PARTS + APART:
            print(f"{part.name:<24}{part.budget_s:>6.0f} s")
        parser.exit()
    if given.only and not _chosen(given.only):
        parser.error(f"no part matches {', '.join(given.only)}")
    return given


def _chosen(only: Sequence[str] | None) -> tuple[Part, ...]:
    return tuple(part for part in PARTS + APART if part.name.startswith(tuple(only))) if only else PARTS


def _prepare_environment(device: str) -> None:
    """Prepare the environment of the processes to start; PYTHONPATH lets them find the packages."""
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def describe(result: "Result") -> str:
    """Describe a part: a line for its outcome, then its notes and figures."""
    lines = [f"== {result.part}: {result.status.value}, {result.seconds:.1f} s"]
    lines += [f"   {name:<40} {value}" for name, value in result.notes.items()]
    for row in result.rows:
        goal = "" if row.goal is None else f"   {row.goal} {_VERDICTS[row.met]}"
        lines.append(f"   {row.name:<40} {report.shown(row.value):>12} {row.unit}{goal}")
    if result.error is not None:
        lines += [f"   | {line}" for line in result.error.rstrip().splitlines()]
    return "\n".join(lines)


def verdict(results: Sequence["Result"], seconds: float) -> str:
    rows = [row for result in results for row in result.rows]
    judged = sum(row.met is not None for row in rows)
    missed = [row.name for row in rows if row.met is False]
    incomplete = [f"{result.part} ({result.status.value})" for result in results if not result.is_complete]
    words = [f"{seconds:.0f} s, {judged - len(missed)} of {judged} goals met"]
    words += [f"missed: {', '.join(missed)}"] if missed else []
    words += [f"incomplete: {', '.join(incomplete)}"] if incomplete else []
    return "; ".join(words)


def num_missed(results: Sequence["Result"]) -> int:
    return sum(report.num_missed(result.rows) for result in results)


def write_json(path: Path, results: Sequence["Result"], *, stage: "Stage", seconds: float) -> None:
    """Write all results so far: `{"device", "shape", "seed", "seconds", "parts": [...], "rows": [...]}`.

    `rows` are those of all parts together, as other benchmarks write theirs.
    """
    parts = [asdict(result) | {"status": result.status.value} for result in results]
    whole: dict[str, Any] = {
        "device": stage.device,
        "shape": stage.shape,
        "seed": stage.seed,
        "seconds": round(seconds, 2),
    }
    whole["is_complete"] = all(result.is_complete for result in results)
    rows = [asdict(row) for result in results for row in result.rows]
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps({**whole, "parts": parts, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)  # if the suite is stopped meanwhile, the previous file remains


if __name__ == "__main__":
    sys.exit(main())
