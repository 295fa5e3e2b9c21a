"""The real lm-eval against a running cluster, and on `transformers` with the same weights: the same accuracy.

`python -m tests.clients.lm_eval` starts a cluster over both pools and runs one local multiple-choice task twice: over
HTTP (`local-completions`, token ids in, `echo` with `logprobs` out) and in process (`hf`, float32). lm-eval lives in
an environment of its own, made once; `--python` names another one that has it.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cluster.cli.demo import STORY
from tandem.model_path import model_directory
from tandem_bench.peers.environments import PeerEnvironment, ensure
from tests.support.running_cluster import running

TASK = "tandem_codes"
_TORCH = "torch==2.13.0"
ENVIRONMENT = PeerEnvironment(
    name="lm-eval", steps=((_TORCH,), (_TORCH, "lm-eval[api]==0.4.13", "transformers==5.23.0", "accelerate"))
)
_KEYS = ("amber", "oak", "moon", "river", "stone", "cloud", "candle", "garden")
_CHOICES = 4
_METRICS = ("acc,none", "acc_norm,none")
_CLOSE = 1e-3
"""Between sums of log probabilities of one choice, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run found."""

    accuracies: tuple[float, ...]
    loglikelihoods: tuple[tuple[float, ...], ...]
    """Of each question's choices."""


def write_task(folder: Path, count: int) -> None:
    """The questions, and what lm-eval must know of them: which of four codes was said of a thing in a story."""
    draw = Random(11)
    questions = []
    for _ in range(count):
        sentences = draw.choices(STORY.split(". "), k=draw.randint(2, 30))
        codes = [str(code) for code in draw.sample(range(1000, 10_000), _CHOICES)]
        things = draw.sample(_KEYS, _CHOICES)
        for thing, code in zip(things, codes, strict=True):
            sentences.insert(draw.randrange(len(sentences)), f"The code of {thing} is {code}")
        label = draw.randrange(_CHOICES)
        text = f"{'. '.join(sentences)}. The code of {things[label]} is"
        questions.append({"text": text, "choices": codes, "label": label})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "text",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": name.partition(",")[0], "aggregation": "mean"} for name in _METRICS],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML


async def evaluate(python: Path, folder: Path, name: str, model: str, arguments: dict[str, Any]) -> Outcome:
    """One run of lm-eval. Raises RuntimeError with its last words."""
    out = folder / name
    command = [
        str(python), "-m", "lm_eval", "--model", model,
        "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
        "--tasks", TASK, "--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "4",
        "--device", "cpu",
    ]  # fmt: skip
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": "none",
    }
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | offline, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{output.decode()[-3000:]}")
    return read_outcome(out)


def read_outcome(out: Path) -> Outcome:
    """Read the results and samples that lm-eval wrote to `out`."""
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"][TASK]
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda one: one["doc_id"])
    return Outcome(
        accuracies=tuple(found[name] for name in _METRICS),
        loglikelihoods=tuple(tuple(float(pair[0]) for pair in line["filtered_resps"]) for line in lines),
    )


async def compare(python: Path, count: int, model: Path) -> list[str]:
    """What differs; a line with the figures is printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, count)
        async with running(model__path=str(model), model__name="served", model__dtype="float32") as cluster:
            arguments = {
                "model": "served",
                "base_url": f"{cluster.local.http_url}/v1/completions",
                "tokenizer": model,
                "tokenized_requests": True,
                "num_concurrent": 4,
                "max_length": 2048,
            }
            ours = await evaluate(python, folder, "cluster", "local-completions", arguments)
        theirs = await evaluate(python, folder, "hf", "hf", {"pretrained": model, "dtype": "float32"})
    pairs = [
        (one, other)
        for mine, yours in zip(ours.loglikelihoods, theirs.loglikelihoods, strict=True)
        for one, other in zip(mine, yours, strict=True)
    ]
    furthest = max(abs(one - other) for one, other in pairs)
    print(  # what it is run for
        f"{count} questions: accuracy {ours.accuracies} over HTTP, {theirs.accuracies} on transformers; "
        f"{len(pairs)} sums of log probabilities differ by at most {furthest:.2e}"
    )
    wrong = [] if ours.accuracies == theirs.accuracies else ["the accuracies differ"]
    return wrong if furthest <= _CLOSE else [*wrong, f"log probabilities differ by more than {_CLOSE}"]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when both agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter that has lm-eval; absent: one is made")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--model", default="builtin", help="a directory in Hugging Face layout")
    given = parser.parse_args(argv)
    python = given.python or ensure(ENVIRONMENT, lambda text: print(text, file=sys.stderr))
    wrong = asyncio.run(compare(python, given.questions, model_directory(given.model)))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
