"""The command line of `python -m tandem_bench telemetry`. Imports nothing heavy: help must come at once."""

import argparse
from pathlib import Path

PARTS = ("router", "cluster")
SECONDS = 180.0
TURN_S = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"of all rounds; one more ends later; {SECONDS:g}"
    )
    parser.add_argument("--turn", type=float, default=TURN_S, metavar="S", help=f"of each load in a turn; {TURN_S:g}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
