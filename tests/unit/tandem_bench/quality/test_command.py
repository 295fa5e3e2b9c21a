"""`tandem eval` as a whole, on the built-in model and random ones: figures, limits, exit codes, refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from tandem.model_path import BUILTIN, model_directory
from tandem_bench import stories
from tandem_bench.make_model import write_model
from tandem_bench.quality.__main__ import main
from tandem_bench.report import Row, read_json
from tandem_bench.shapes import SHAPES
from tests.support.engine.gguf_writer import write_gguf
from worker.decisions.quality_gate import QualityGate, WindowScores, quality_loss

FEW = ["--samples", "2", "--lengths", "256", "--threads", "1"]
Evaluate = Callable[..., tuple[int, dict[str, Row]]]


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    def run(*arguments: str) -> tuple[int, dict[str, Row]]:
        file = tmp_path / "figures.json"
        code = main([*arguments, *FEW, "--json", str(file)])
        rows = read_json(file)
        return code, {row.name: row for row in rows}

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n".join(stories.tell(Random(f"test:{i}")).text for i in range(20)))
    return path


@pytest.fixture
def wrecked(tmp_path: Path) -> Path:
    """The built-in model, one of whose matrices has four times its scale."""
    folder = tmp_path / "wrecked"
    shutil.copytree(model_directory(BUILTIN), folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_eval_model_against_itself_loses_nothing(evaluate: Evaluate, text: Path) -> None:
    code, rows = evaluate(BUILTIN, "--text", str(text))
    assert code == 0
    assert rows["kl.mean"].value == rows["kl.p99"].value == 0.0
    assert rows["kl.top1"].value == 100.0
    assert rows["perplexity.rise"].value == rows["needle.256.lost"].value == rows["json.lost"].value == 0.0


def test_eval_json_file_has_every_figure_and_its_command(tmp_path: Path, text: Path) -> None:
    file = tmp_path / "figures.json"
    assert main([BUILTIN, "--text", str(text), *FEW, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["about"]["command"].startswith("tandem eval builtin --text")
    judged = {row["name"]: row["goal"] for row in written["rows"] if row["met"] is not None}
    assert judged == {
        "perplexity.rise": "<= 1",
        "kl.mean": "<= 0.01",
        "needle.256.lost": "<= 2",
        "json.lost": "<= 2",
    }
    assert {row["name"] for row in written["rows"]} - judged.keys() == {
        "perplexity.tokens",
        "perplexity.base",
        "perplexity.model",
        "kl.tokens",
        "kl.p99",
        "kl.top1",
        "needle.256.base",
        "needle.256.model",
        "needle.256.model.at_0",
        "needle.256.model.at_25",
        "json.base",
        "json.model",
    }


@pytest.mark.parametrize(
    ("quantization", "rise_goal", "divergence_goal"),
    [("int8", "<= 1", "<= 0.01"), ("int4", "<= 5", None), ("fp8", "<= 1", "<= 0.01"), ("nf4", "<= 5", None)],
)
def test_eval_builtin_model_quantized_at_load_keeps_its_limits(
    quantization: str, rise_goal: str, divergence_goal: str | None, evaluate: Evaluate, text: Path
) -> None:
    code, rows = evaluate(BUILTIN, "--quantization", quantization, "--text", str(text))
    assert code == 0
    assert (rows["perplexity.rise"].goal, rows["kl.mean"].goal) == (rise_goal, divergence_goal)
    assert 0.0 < rows["kl.mean"].value < 0.01
    assert rows["kl.mean"].value < rows["kl.p99"].value
    assert rows["needle.256.model"].value == rows["json.model"].value == 100.0


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_eval_quantized_cache_has_no_promised_divergence(kv_dtype: str, evaluate: Evaluate) -> None:
    code, rows = evaluate(BUILTIN, "--kv-dtype", kv_dtype, "--dtype", "bfloat16", "--suite", "kl,json")
    assert code == 0
    assert rows["json.model"].value == 100.0
    assert rows["kl.mean"].value > 0.0
    assert rows["kl.mean"].met is None


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_eval_wrecked_scale_breaks_the_limits(
    quantization: str, wrecked: Path, evaluate: Evaluate, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = evaluate(str(wrecked), "--quantization", quantization, "--against", BUILTIN, "--text", str(text))
    assert code == 1
    assert rows["perplexity.rise"].met is False
    assert rows["kl.mean"].met is (None if quantization == "int4" else False)
    assert "NOT MET" in capsys.readouterr().out


def test_eval_quantized_gguf_file_is_compared_with_its_float_weights(
    tmp_path: Path, evaluate: Evaluate, text: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(model_directory(BUILTIN), file, block_type="Q4_0", pre="smollm")
    code, rows = evaluate(str(file), "--against", BUILTIN, "--text", str(text))
    assert code == 0
    assert (rows["perplexity.rise"].goal, rows["kl.mean"].goal) == ("<= 5", None)
    assert 0.0 < rows["kl.mean"].value < 0.1
    assert rows["needle.256.model"].value == rows["json.model"].value == 100.0


def test_eval_random_model_knows_nothing_and_loses_nothing(tmp_path: Path, evaluate: Evaluate) -> None:
    write_model(tmp_path, SHAPES["tiny"], dtype="float32")
    code, rows = evaluate(str(tmp_path), "--suite", "kl,json")
    assert code == 0
    assert rows["kl.top1"].value == 100.0
    assert rows["json.base"].value == rows["json.model"].value == rows["json.lost"].value == 0.0


def test_eval_base_with_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, SHAPES["tiny"], dtype="float32")
    assert main([BUILTIN, "--against", str(tmp_path), "--suite", "json", *FEW]) == 2
    assert "split a text into different tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BUILTIN, "--suite", "kl,speed"], "'speed' is not a suite: choose from perplexity, kl, needle, json"),
        ([BUILTIN, "--suite", ","], "names no suite"),
        ([BUILTIN, "--suite", "perplexity"], "--suite perplexity needs --text FILE"),
        ([BUILTIN, "--quantization", "int3"], "invalid choice: 'int3'"),
        ([BUILTIN, "--lengths", "512,100"], "must be at least 256, got 100"),
        ([BUILTIN, "--samples", "0"], "must be at least 1, got 0"),
        ([BUILTIN, "--json", "/nowhere/figures.json"], "/nowhere/figures.json: no such directory"),
        ([], "MODEL"),
    ],
)
def test_eval_wrong_option_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "/nowhere/model is neither a directory nor a .gguf file"),
        ([BUILTIN, "--against", "/nowhere/base"], "/nowhere/base is neither a directory nor a .gguf file"),
        ([BUILTIN, "--text", "/nowhere/text"], "/nowhere/text"),
        ([BUILTIN, "--text", "/dev/null"], "/dev/null"),
        ([BUILTIN, "--suite", "needle", "--lengths", "4096"], "the context is 2048: choose shorter --lengths"),
        ([BUILTIN, "--suite", "kl", "--quantization", "int8", "--dtype", "float32"], "bfloat16"),
    ],
)
def test_eval_wrong_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--samples", "1"]) == 2
    assert message in capsys.readouterr().err


def test_eval_empty_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    assert main([BUILTIN, "--text", str(tmp_path / "empty")]) == 2
    assert "fewer than two tokens" in capsys.readouterr().err


def test_eval_gate_is_what_the_base_expects(evaluate: Evaluate, wrecked: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    more = ("--against", BUILTIN, "--text", str(text), "--suite", "perplexity", "--gate", str(file))
    code, rows = evaluate(str(wrecked), *more)
    assert code == 1, "the model is bad, and the base's expectations are written all the same"
    gate = QualityGate.parse(file.read_text())
    assert gate.base == "builtin in float32"
    found = [WindowScores(logprobs=window.logprobs, top_ids=window.top_ids) for window in gate.windows]
    assert len(found) == 2
    assert quality_loss(gate, found).perplexity == pytest.approx(rows["perplexity.base"].value, rel=1e-5)


def test_eval_gate_needs_a_suite_with_a_text_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, wrong in (
        (["--suite", "json", "--gate", str(tmp_path / "gate.json")], "--gate needs the suite perplexity or kl"),
        (["--gate", str(tmp_path / "no/gate.json")], "no such directory"),
    ):
        with pytest.raises(SystemExit):
            main([BUILTIN, *options])
        assert wrong in capsys.readouterr().err


def test_eval_task_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tandem_bench.quality.__main__.find_spec", lambda _name: None)
    assert main([BUILTIN, "--suite", "lm_eval:arc_easy"]) == 2
    assert "lm_eval: not installed; it comes with the extra `eval`" in " ".join(capsys.readouterr().err.split())


def test_eval_suite_that_is_unknown_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("nonsense", "lm_eval:", "kl,lm_eval"):
        with pytest.raises(SystemExit):
            main([BUILTIN, "--suite", wrong])
        assert "choose from perplexity, kl, needle, json, lm_eval:TASK" in " ".join(capsys.readouterr().err.split())
