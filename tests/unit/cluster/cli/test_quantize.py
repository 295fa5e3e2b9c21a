"""`tandem quantize`: the directory that it writes, what it says, refusals, and the pieces of a text."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.main import app
from cluster.cli.quantize import MethodChoice, SchemeChoice, calibration_chunks
from engine.model.config import load_model_config
from engine.quantize.settings import Method, Scheme
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError
from tandem.model_path import model_directory
from tests.support.engine.paged_harness import load_plain

BUILTIN = model_directory("builtin")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("The miller had a cat, and the cat had a mouse. Where was the cheese?\n" * 40, encoding="utf-8")
    return file


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_quantize_choices_are_those_of_the_engine() -> None:
    assert [one.value for one in SchemeChoice] == [one.value for one in Scheme]
    assert [one.value for one in MethodChoice] == [one.value for one in Method]


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (("--scheme", "int4"), "pack-quantized, 4 bits, groups of 32"),
        (("--scheme", "int4", "--group-size", "128", "--calibrate", "TEXT"), "pack-quantized, 4 bits, groups of 128"),
        (("--scheme", "int8", "--calibrate", "TEXT"), "int-quantized, 8 bits"),
    ],
)
def test_quantize_writes_a_directory_that_loads(
    options: tuple[str, ...], described: str, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = [text if option == "TEXT" else option for option in options]
    result = invoke("builtin", out, *given, *(("--chunks", 2, "--chunk-tokens", 64) if text in given else ()))
    assert (result.exit_code, result.exception) == (0, None)
    assert f"{out}: 28 matrices, 6.3 became " in result.stdout
    assert described in str(load_model_config(out).weight_format)
    assert load_plain(out).config.num_layers == 4
    assert Tokenizer.load(out).has_chat_template == Tokenizer.load(BUILTIN).has_chat_template


def test_quantize_names_what_it_leaves_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.quantize import model_quantizer

    written = model_quantizer.QuantizedModel(
        num_quantized=3, dense=("model.layers.0.mlp.down_proj",), old_bytes=2**20, new_bytes=2**19
    )
    monkeypatch.setattr(model_quantizer, "quantize_model", lambda *_args, **_options: written)
    result = invoke("builtin", tmp_path / "out", "--scheme", "int4")
    assert "left dense, since groups of 32 do not divide their columns:\n" in result.stdout
    assert "\n  model.layers.0.mlp.down_proj\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nonexistent", "OUT", "--scheme", "int4"), "model.path: /nonexistent is neither a directory nor"),
        (("builtin", ".", "--scheme", "int4"), "exists and is not an empty directory"),
        (("builtin", "OUT", "--scheme", "int4", "--method", "gptq"), "--method gptq needs a text"),
        (("builtin", "OUT", "--scheme", "int4", "--calibrate", "/nonexistent"), "/nonexistent: No such file"),
    ],
)
def test_quantize_refuses_by_name(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = invoke(*(tmp_path / "out" if one == "OUT" else one for one in arguments))
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_quantize_without_a_scheme_is_a_usage_error(tmp_path: Path) -> None:
    assert invoke("builtin", tmp_path / "out").exit_code == 2
    assert invoke("builtin", tmp_path / "out", "--scheme", "int3").exit_code == 2


def test_calibration_chunks_are_whole_pieces_in_the_order_of_the_text(text: Path) -> None:
    tokenizer = Tokenizer.load(BUILTIN)
    whole = tokenizer.encode(text.read_text(), add_special_tokens=False)
    marked = tokenizer.encode("a")
    start = marked[: len(marked) - len(tokenizer.encode("a", add_special_tokens=False))]
    chunks = calibration_chunks(BUILTIN, text, count=3, size=50)
    assert [len(chunk) for chunk in chunks] == [50, 50, 50]
    assert all(chunk[: len(start)] == start for chunk in chunks)
    assert [token for chunk in chunks for token in chunk[len(start) :]] == whole[: 3 * (50 - len(start))]
    many = calibration_chunks(BUILTIN, text, count=1000, size=50)
    assert len(many) == len(whole) // (50 - len(start))


def test_calibration_chunks_of_a_short_text_are_one(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Hello there")
    (chunk,) = calibration_chunks(BUILTIN, file, count=4, size=512)
    assert Tokenizer.load(BUILTIN).encode("Hello there") == chunk


@pytest.mark.parametrize(("content", "message"), [(b"", "has no text"), (b"a\0b", "NUL"), (b"\xff", "not UTF-8")])
def test_calibration_text_that_cannot_be_read_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        calibration_chunks(BUILTIN, file, count=4, size=512)
