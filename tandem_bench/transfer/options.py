"""The command line of `python -m tandem_bench transfer`. Imports nothing heavy, so that help appears at once."""

import argparse
from pathlib import Path

PARTS = ("rates", "planning", "checksums", "overlap", "pull")
DEFAULT_PARTS = PARTS[:2]
"""Default parts: they take about a minute once the peers' environments exist."""
PEER_NAMES = ("nixl", "mooncake", "gloo")
ROUNDS = 5
PAYLOAD_MIB = 128


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument(
        "--peer", nargs="+", choices=PEER_NAMES, metavar="PEER", help=f"some of: {', '.join(PEER_NAMES)}; default: all"
    )
    peers.add_argument("--no-peers", action="store_true", help="measure Tandem and the machine's limits only")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help=f"interleaved rounds of rates; default: {ROUNDS}, fewer if slow"
    )
    parser.add_argument("--mib", type=_positive, default=PAYLOAD_MIB, metavar="N", help="MiB per transfer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rates; needs matplotlib")


def parts(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts to measure, in the order of PARTS."""
    wanted = options.only or DEFAULT_PARTS
    return tuple(part for part in PARTS if part in wanted)


def peers(options: argparse.Namespace) -> tuple[str, ...]:
    if options.no_peers:
        return ()
    return tuple(dict.fromkeys(options.peer)) if options.peer else PEER_NAMES


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
