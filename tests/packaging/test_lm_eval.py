"""Tasks of lm-evaluation-harness through `tandem eval`, beside the harness's own way to run a model of Hugging Face.

Its hundred packages are installed into an environment that has all else from the one that the tests run in.
"""

import json
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
import yaml

from tandem_bench import stories
from tests.packaging.environment import ROOT, Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_DOCUMENTS = 12
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
PEER = """
import json, sys
from lm_eval import simple_evaluate
done = simple_evaluate(
    "hf", model_args={"pretrained": sys.argv[1], "dtype": "float32"}, tasks=sys.argv[2:], limit=int(8),
    bootstrap_iters=0, batch_size=1, device="cpu",
)
figures = {
    f"{task}.{name.partition(',')[0]}": value
    for task, found in done["results"].items() for name, value in found.items() if isinstance(value, float)
}
print(json.dumps(figures))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("lm-eval")
    with Environment(folder) as made:
        version = f"python{sysconfig.get_python_version()}"
        packages = folder / "environment/lib" / version / "site-packages"
        (packages / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        made.install("--constraint", str(ROOT / "constraints.txt"), "lm_eval>=0.4.13", "accelerate")
        yield made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One of each kind: choices, a text's probability, answers up to a stop string."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = []
    for number in range(NUM_DOCUMENTS):
        told, other = (stories.tell(Random(f"{kind}:{number}")).text.split() for kind in ("task", "other"))
        choices = [" ".join(told[30:36]), " ".join(other[3:9]), "zebra quantum"]
        right = number % 3
        choices[0], choices[right] = choices[right], choices[0]
        lines.append(
            {
                "context": " ".join(told[:30]),
                "choices": [f" {choice}" for choice in choices],
                "right": right,
                "text": " ".join(told * 3),
                "answer": " ".join(told[30:34]),
            }
        )
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
    }
    made: dict[str, Mapping[str, object]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_target": "right",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "answers": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
        },
    }
    files = []
    for name, task in made.items():
        files.append(str(folder / f"{name}.yaml"))
        Path(files[-1]).write_text(yaml.safe_dump({"task": name, **common, **task}), encoding="utf-8")
    return files


def _evaluate(environment: Environment, folder: Path, *suites: str, exit_code: int = 0) -> tuple[dict[str, float], str]:
    file = folder / "figures.json"
    options = ["--suite", ",".join(f"lm_eval:{one}" for one in suites), "--samples", "8", "--threads", "1"]
    code, output = environment.outcome(
        "python", "-m", "tandem_bench.quality", "builtin", *options, "--json", str(file), cwd=ROOT, more=OFFLINE
    )
    assert code == exit_code, output
    rows = json.loads(file.read_text())["rows"] if not code else []
    return {row["name"]: row["value"] for row in rows}, output


def test_tasks_give_the_figures_of_the_harness_itself(
    environment: Environment, tasks: list[str], tmp_path: Path
) -> None:
    """In float32, as both compute."""
    figures, _ = _evaluate(environment, tmp_path, *tasks)
    model = str(ROOT / "engine/builtin_model")
    peer = json.loads(environment.run("python", "-c", PEER, model, *tasks, cwd=ROOT, more=OFFLINE).splitlines()[-1])
    assert set(peer) == {
        *("choices.acc", "choices.acc_norm", "texts.word_perplexity", "texts.bits_per_byte"),
        *("answers.exact_match", "answers.bleu"),
    }
    assert peer["choices.acc"] > 0.3
    assert peer["texts.word_perplexity"] > 1.0
    assert peer["answers.bleu"] > 0.0
    for name, value in peer.items():
        assert figures[f"lm_eval:{name}.model"] == pytest.approx(value, rel=1e-5), name
    judged = {name: value for name, value in figures.items() if name.endswith((".lost", ".rise"))}
    assert judged == dict.fromkeys(
        (
            *("lm_eval:choices.acc.lost", "lm_eval:choices.acc_norm.lost", "lm_eval:answers.exact_match.lost"),
            *("lm_eval:texts.word_perplexity.rise", "lm_eval:texts.bits_per_byte.rise"),
        ),
        0.0,
    )


def test_task_that_is_not_there_is_named(environment: Environment, tmp_path: Path) -> None:
    _, output = _evaluate(environment, tmp_path, "no_such_task", exit_code=2)
    assert "error: lm_eval:no_such_task: " in output
