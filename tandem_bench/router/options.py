"""The command line of `python -m tandem_bench router`. Imports nothing heavy, so that help appears at once."""

import argparse
from pathlib import Path

PARTS = ("doors", "first_token", "budget", "placement", "prefix_map", "agentic", "redis", "overload")
PEER_NAMES = ("nginx", "sglang-router")
ROUNDS = 3
REPEATS = 30
AGENTIC_REQUESTS = 1_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument(
        "--peer", nargs="+", choices=PEER_NAMES, default=[], metavar="PEER", help=f"some of: {', '.join(PEER_NAMES)}"
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=ROUNDS,
        metavar="N",
        help=f"rounds of `doors` (the HTTP server), of which the best counts; default: {ROUNDS}",
    )
    parser.add_argument(
        "--repeats",
        type=_positive,
        default=REPEATS,
        metavar="N",
        help=f"repeats of the other parts, likewise; default: {REPEATS}",
    )
    parser.add_argument(
        "--requests",
        type=_positive,
        default=AGENTIC_REQUESTS,
        metavar="N",
        help=f"requests of `agentic`, for each policy and seed; default: {AGENTIC_REQUESTS}",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="give the sessions of `agentic` the lengths of this trace (Mooncake's .jsonl); default: built-in ones",
    )
    parser.add_argument(
        "--flames", type=Path, metavar="FOLDER", help="write the flame graphs of `budget` to this folder"
    )
    parser.add_argument("--tls", action="store_true", help="`doors` once more with cluster.tls, in alternation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def parts(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts to measure, in the order of PARTS."""
    wanted = options.only or PARTS
    return tuple(part for part in PARTS if part in wanted)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
