"""Options of `python -m tandem_bench adapters`."""

import argparse
from functools import partial
from pathlib import Path

MAX_REQUESTS = 1000
"""Decisions that a router lists at once."""
PARTS = ("steps", "landing")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--model", metavar="DIR", help="model of the steps; default: random weights of 0.5 billion")
    for name, default, most, text in (
        ("rounds", 8, 1000, "of the steps"),
        ("threads", 2, 512, "of the steps"),
        ("adapters", 100, 1000, "adapters that requests name"),
        ("resident", 8, 1000, "adapters that a worker has room for"),
        ("requests", MAX_REQUESTS, MAX_REQUESTS, "requests for adapters"),
        ("seed", 1, 1 << 30, "of the requests"),
    ):
        shown = f"{text}; default: {default}"
        parser.add_argument(f"--{name}", type=partial(_up_to, most), default=default, metavar="N", help=shown)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def _up_to(most: int, text: str) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be 1 to {most}, got {text}")
    return value
