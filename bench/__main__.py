"""`python -m bench SUBJECT`: measure Tandem and print the figures. `tandem bench` runs this."""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console

from bench import report


def main() -> int:
    """Parse the command line, measure, report; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Tandem and print the figures.")
    subjects = parser.add_subparsers(dest="subject", required=True)
    spine = subjects.add_parser("spine", help="parity with transformers, start-up, latency, the model's own gates")
    spine.add_argument("--quick", action="store_true", help="a sample of each figure, in under a minute")
    spine.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help=f"some of: {', '.join(PARTS)}")
    spine.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    options = parser.parse_args()

    from bench.spine import Scale, measure

    scale = Scale.quick() if options.quick else Scale()
    rows = asyncio.run(measure(scale, options.only or PARTS, Console(stderr=True, highlight=False)))
    report.show(Console(highlight=False), rows)
    if options.json is not None:
        report.write_json(options.json, rows)
    return 1 if report.num_missed(rows) else 0


PARTS = ("logits", "gates", "startup", "speed", "parity", "bf16")

if __name__ == "__main__":
    sys.exit(main())
