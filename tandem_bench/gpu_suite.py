"""Everything that only a GPU machine can say, in one command: `python tandem_bench/gpu_suite.py --json gpu.json`.

Parity of kernels and engine, the machine's ceilings, an 8B-shaped random model's speed against them, peers; under eight
minutes on an H200. Needs torch, triton, numpy and safetensors, and transformers for parity and its own speed; no
model, no network, no installation of this package. Every part runs in a process of its own within a budget of its own
(bench.gpu.isolation): what fails is reported and the rest goes on.

`--device cpu --shape tiny` runs all of it small, with kernels in Triton's interpreter, to see that it runs.

Exit code: 0, or 1 when a goal was missed, or 2 when a part failed or had no time.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a file: the directory above holds the packages, and the file's own must not shadow anybody's modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tandem_bench.gpu.parts import PARTS, Part

LIMIT_S = 477.0
"""Of the eight minutes: the parts' budgets, and what their processes take to begin and to end."""
EXIT_MISSED, EXIT_INCOMPLETE = 1, 2
_FORK_SAFE = ("numpy", "torch", "triton")
_MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; the process's exit code."""
    given = _options(argv)
    # Before anything imports triton: it decides then whether kernels are interpreted.
    _prepare_environment(given.device)
    from tandem_bench.gpu import summary
    from tandem_bench.gpu.isolation import Result, Workshop
    from tandem_bench.gpu.stage import Stage

    started_s = time.monotonic()
    # Importing model code may look for GPUs, which a process that others are forked from must not do.
    workshop = Workshop(_FORK_SAFE + (_MODELS if given.device == "cpu" else ()))
    workshop.warm()
    stage = Stage(device=given.device, shape=given.shape, seed=given.seed, deadline_s=started_s + given.limit_s)
    results: list[Result] = []
    for part in _chosen(given.only):
        results.append(workshop.run(part, stage))
        print(summary.text(results[-1]), flush=True)
        if given.json is not None:
            summary.write_json(given.json, results, stage=stage, seconds=time.monotonic() - started_s)
    print(summary.verdict(results, time.monotonic() - started_s))
    if not all(result.is_complete for result in results):
        return EXIT_INCOMPLETE
    return EXIT_MISSED if summary.num_missed(results) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite", description="What only a GPU machine can say about Tandem.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default=None, help="random model: tiny, 0.5b, 1b, 8b; by default 8b, on a CPU tiny")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts by name or by what their names begin with")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="the whole suite's time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found to this file as well")
    given = parser.parse_args(argv)
    given.shape = given.shape or ("8b" if given.device == "cuda" else "tiny")
    if given.list:
        for part in PARTS:
            print(f"{part.name:<24}{part.budget_s:>6.0f} s")
        parser.exit()
    if given.only and not _chosen(given.only):
        parser.error(f"no part is named like {', '.join(given.only)}")
    return given


def _chosen(only: Sequence[str] | None) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if not only or part.name.startswith(tuple(only)))


def _prepare_environment(device: str) -> None:
    """For the processes that are to come. A directory on PYTHONPATH, so that they find the packages as well."""
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.pop("TRITON_INTERPRET", None)


if __name__ == "__main__":
    sys.exit(main())
