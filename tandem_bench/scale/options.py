"""The command line of `python -m tandem_bench scale`. Imports nothing heavy, so that help appears at once."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name, default, text in (
        ("workers", 1000, "workers"),
        ("routers", 2, "router processes, each with a session to every worker"),
        ("streams", 5000, "streams that are alive at a time, of a token each second"),
        ("storm", 100, "workers that crash, come or leave at once"),
        ("tokens", 60, "tokens of an answer on average"),
        ("seconds", 20, "seconds before and after each storm"),
        ("seed", 1, "of the prompts"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
