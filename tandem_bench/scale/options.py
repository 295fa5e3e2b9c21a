"""The command line of `python -m tandem_bench scale`. Imports nothing heavy, so that help appears at once."""

import argparse
from functools import partial
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name, least, default, text in (
        ("workers", 3, 1000, "workers"),
        ("routers", 1, 2, "router processes, each with a session to every worker"),
        ("streams", 1, 5000, "streams that are alive at a time, of a token each second"),
        ("storm", 1, 100, "workers that crash, come or leave at once"),
        ("tokens", 4, 60, "tokens of an answer on average"),
        ("seconds", 1, 20, "seconds before and after each storm"),
        ("seed", 0, 1, "of the prompts"),
    ):
        shown = f"{text}; default: {default}"
        parser.add_argument(f"--{name}", type=partial(_at_least, least), default=default, metavar="N", help=shown)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return value
