"""`python -m bench SUBJECT`: measure Tandem and print the figures. `tandem bench` runs this."""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bench import report
from bench.errors import CannotMeasure
from bench.report import Row


def main() -> int:
    """Parse the command line, measure, report; 1 when a goal was missed, 2 when something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Tandem and print the figures.")
    subjects = parser.add_subparsers(dest="subject", required=True)
    spine = subjects.add_parser("spine", help="parity with transformers, start-up, latency, the model's own gates")
    scales = spine.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="a sample of each figure, in under a minute")
    scales.add_argument("--full", action="store_true", help="parity in every combination; about twice the time")
    spine.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help=f"some of: {', '.join(PARTS)}")
    spine.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    options = parser.parse_args()

    err = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    try:
        asyncio.run(_spine(options, rows, err))
    except CannotMeasure as error:
        err.print(Text(str(error), style="red"), soft_wrap=True)
        return EXIT_CANNOT_MEASURE
    finally:
        _tell(rows, options.json)
    return 1 if report.num_missed(rows) else 0


async def _spine(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    """Adds to `rows` part by part, so that a later part's failure loses nothing."""
    from bench.spine import Scale, measure

    scale = Scale.quick() if options.quick else Scale.full() if options.full else Scale()
    async for part in measure(scale, options.only or (QUICK_PARTS if options.quick else PARTS), err):
        rows += part


def _tell(rows: list[Row], file: Path | None) -> None:
    out = Console(highlight=False)
    report.show(out if out.is_terminal else Console(highlight=False, width=WIDTH), rows)
    if file is not None:
        report.write_json(file, rows)


EXIT_CANNOT_MEASURE = 2
WIDTH = 120
"""Of a table in a file or a pipe."""
PARTS = ("logits", "gates", "startup", "speed", "parity", "bf16")
QUICK_PARTS = PARTS[:-1]
"""bf16 has no goal, and the fewer prompts, the less its rate says."""

if __name__ == "__main__":
    sys.exit(main())
