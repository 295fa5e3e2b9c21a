"""`python -m tandem_bench.quality MODEL`: what a model, or a way to compute it, loses in quality. `tandem eval` runs
this.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.text import Text

from tandem.config.pools import CacheDtype, Quantization
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError
from tandem_bench import report
from tandem_bench.report import Row

EXIT_MISSED = 1
EXIT_CANNOT_MEASURE = 2
EXIT_INTERRUPTED = 130
SUITES = ("perplexity", "kl", "needle", "json")
MIN_LENGTH = 256
"""Least length of a needle prompt: the facts, the question and a chat template take most of less."""
_MAX_TEXT_BYTES = 1 << 30
_WIDTH = 120
_DTYPES = ("float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tandem eval",
        description="Measure what a model, or a way to compute it, loses in quality against a base. Runs on the CPU.",
        epilog="Exit code: 1 if a limit was broken, 2 if something could not be measured.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="directory in Hugging Face layout, .gguf file, or `builtin`")
    add("--against", metavar="BASE", help="directory or file of the base; default: MODEL itself")
    add(
        "--suite",
        type=_suites,
        metavar="NAME,NAME",
        help=f"some of: {', '.join(SUITES)}, lm_eval:TASK (a name or YAML file of lm-evaluation-harness; with the "
        "extra `eval`); default: all but tasks, and perplexity only with --text",
    )
    add("--text", type=Path, metavar="FILE", help="text to score, of the kind that the model is used for")
    _add_precision(made)
    add(
        "--samples",
        type=_at_least(1),
        default=100,
        metavar="N",
        help="questions of each kind, and at most so many windows of text; default: 100, of which two may be lost",
    )
    add(
        "--lengths",
        type=_lengths,
        default=(512,),
        metavar="N,N",
        help="tokens of the needle prompts; default: 512",
    )
    add(
        "--gate",
        type=Path,
        metavar="FILE",
        help="also write what the base expects of the text, for engine.quality_gate",
    )
    add("--threads", type=_at_least(1), metavar="N", help="CPU threads; default: all")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    return made


def _add_precision(made: argparse.ArgumentParser) -> None:
    """Add how the model, and the base, are computed."""
    add = made.add_argument
    add(
        "--quantization",
        choices=get_args(Quantization),
        default="auto",
        help="engine.quantization of MODEL; default: auto",
    )
    add(
        "--kv-dtype",
        choices=get_args(CacheDtype),
        default="auto",
        help="engine.kv_dtype of MODEL; default: auto",
    )
    add(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help="model.dtype of MODEL; default: auto, the checkpoint's, and bfloat16 with int8 and int4",
    )
    add(
        "--base-dtype",
        choices=_DTYPES,
        default="float32",
        help="dtype of the base, whose weights are never quantized by us; default: float32",
    )


def _suites(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if unknown := next((name for name in names if name not in SUITES and not _is_task(name)), None):
        choices = f"{', '.join(SUITES)}, lm_eval:TASK"
        raise argparse.ArgumentTypeError(f"{unknown[:40]!r} is not a suite: choose from {choices}")
    if not names:
        raise argparse.ArgumentTypeError(f"names no suite: choose from {', '.join(SUITES)}")
    return names


def _is_task(name: str) -> bool:
    beginning, _, task = name.partition(":")
    return beginning == "lm_eval" and bool(task)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_at_least(MIN_LENGTH), text.split(","))))


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure and report; return 1 when a limit was broken, 2 when a measurement failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsing = parser()
    options = parsing.parse_args(arguments)
    if options.suite is not None and "perplexity" in options.suite and options.text is None:
        parsing.error("--suite perplexity needs --text FILE")
    for file in (options.json, options.gate):
        if file is not None and not file.absolute().parent.is_dir():
            parsing.error(f"{file}: no such directory")
    if options.gate is not None and not {"perplexity", "kl"} & set(options.suite or SUITES):
        parsing.error("--gate needs the suite perplexity or kl, whose text it takes")
    err = Console(stderr=True, highlight=False)
    out = Console(highlight=False)
    rows: list[Row] = []
    try:
        _measure(options, rows, err)
    except ConfigError as error:
        err.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return EXIT_CANNOT_MEASURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        if rows:
            report.print_table(out if out.is_terminal else Console(highlight=False, width=_WIDTH), rows)
        if options.json is not None:
            report.write_json(options.json, rows, about=report.circumstances(["tandem", "eval", *arguments]))
    return EXIT_MISSED if report.num_missed(rows) else 0


def _measure(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    """Read the text, then measure, adding to `rows`. Raises ConfigError."""
    text = None if options.text is None else read_regular_text(options.text, max_bytes=_MAX_TEXT_BYTES)
    suites = options.suite or (SUITES if text is not None else SUITES[1:])
    if any(map(_is_task, suites)) and find_spec("lm_eval") is None:
        raise ConfigError("lm_eval: not installed; it comes with the extra `eval`: pip install '.[bench,eval]'")
    # Imported late: it loads torch, and a wrong option is answered before.
    from tandem_bench.quality.engine_forward import Precision
    from tandem_bench.quality.measure import Plan, measure, resolve_precision

    precision = resolve_precision(
        options.model, dtype=options.dtype, quantization=options.quantization, kv_dtype=options.kv_dtype
    )
    plan = Plan(
        model=options.model,
        precision=precision,
        base=options.against or options.model,
        base_precision=Precision(dtype=options.base_dtype),
        suites=suites,
        text=text,
        samples=options.samples,
        lengths=options.lengths,
        num_threads=options.threads or os.cpu_count() or 1,
    )
    measure(plan, rows, note=lambda line: err.print(Text(line, style="dim"), soft_wrap=True), gate=options.gate)


if __name__ == "__main__":
    sys.exit(main())
