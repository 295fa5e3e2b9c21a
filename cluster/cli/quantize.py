"""`tandem quantize`: writes a model directory with weights of four or eight bits, made of a dense one."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

_MAX_TEXT_BYTES = 1 << 30
_CHARS_OF_TOKEN = 16
"""Characters read for each token of calibration that is wanted: texts have about four."""


class SchemeChoice(StrEnum):
    """Values of `--scheme`, as `engine.quantize.settings.Scheme`, which would load torch."""

    INT4 = "int4"
    INT8 = "int8"


class MethodChoice(StrEnum):
    """Values of `--method`, as `engine.quantize.settings.Method`, which would load torch."""

    ROUND = "round"
    GPTQ = "gptq"
    SMOOTH = "smooth"


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory in Hugging Face layout; safetensors.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory, or an empty one.")],
    *,
    scheme: Annotated[
        SchemeChoice,
        typer.Option(help="int4: weights in four bits, by groups; int8: weights and activations in eight."),
    ],
    group_size: Annotated[
        int | None, typer.Option(metavar="32|64|128", help="Columns that share a scale, for int4; default: 32.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text in UTF-8, of the kind that the model will read.")
    ] = None,
    method: Annotated[
        MethodChoice | None,
        typer.Option(help="Default: round; with [b]--calibrate[/b] gptq for int4, smooth (SmoothQuant) for int8."),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Most pieces of the text that are read.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a piece.")] = 512,
) -> None:
    """Quantize a model into a directory in compressed-tensors layout, for Tandem, vLLM and transformers."""
    from engine.quantize.model_quantizer import quantize_model
    from engine.quantize.settings import Method, QuantizationSettings, Scheme
    from tandem.model_path import model_directory

    settings = QuantizationSettings.resolve(
        Scheme(scheme.value),
        method=None if method is None else Method(method.value),
        group_size=group_size,
        is_calibrated=calibrate is not None,
    )
    directory = model_directory(str(model))
    examples = [] if calibrate is None else calibration_chunks(directory, calibrate, count=chunks, size=chunk_tokens)
    with _progress() as progress:
        task = progress.add_task(f"{settings.scheme.value}, {settings.method.value}", total=None)
        done = quantize_model(
            directory,
            out,
            settings,
            chunks=examples,
            progress=lambda count, total: progress.update(task, completed=count, total=total),
        )
    print(f"{out}: {done.num_quantized} matrices, {_mib(done.old_bytes)} became {_mib(done.new_bytes)} MiB")
    if done.dense:
        print(f"left dense, since groups of {settings.group_size} do not divide their columns:")
        for module in done.dense:
            print(f"  {module}")


def calibration_chunks(directory: Path, text: Path, *, count: int, size: int) -> list[list[int]]:
    """Token ids of the beginning of a text: at most `count` pieces of `size`, each begun as the tokenizer begins texts.

    A shorter rest is left out, unless it is all there is. Raises ConfigError for files that cannot be read, and for a
    text without tokens.
    """
    from router.text.tokenizer import Tokenizer
    from tandem.config.source.regular_file import read_regular_text
    from tandem.errors import ConfigError, InvalidRequest

    tokenizer = Tokenizer.load(directory)
    whole = read_regular_text(text, max_bytes=_MAX_TEXT_BYTES)
    try:
        plain = tokenizer.encode(whole[: count * size * _CHARS_OF_TOKEN], add_special_tokens=False)
        letter, marked = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    except InvalidRequest:  # whose message is about a client's prompt
        raise ConfigError(f"{text}: has characters that cannot be tokenized, such as NUL") from None
    found = (at for at in range(len(marked)) if letter and marked[at : at + len(letter)] == letter)
    start = marked[: next(found, 0)]
    width = max(1, size - len(start))
    pieces = [plain[begin : begin + width] for begin in range(0, min(len(plain), count * width), width)]
    whole_pieces = [piece for piece in pieces if len(piece) == width] or pieces
    if not whole_pieces:
        raise ConfigError(f"{text}: has no text")
    return [[*start, *piece] for piece in whole_pieces]


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
