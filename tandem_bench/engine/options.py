"""The command line of `python -m tandem_bench engine`. Imports nothing heavy, so that help appears at once."""

import argparse
from pathlib import Path

PARTS = ("engine", "prefills", "worker", "baselines", "scheduling", "eviction")
MODEL_PARTS = PARTS[:3]
"""Parts that measure the selected model; also the default parts."""
SHAPE_NAMES = ("tiny", "0.04b", "0.5b", "1b", "8b", "tiny-moe", "0.9b-moe")
PEER_NAMES = ("transformers", "vllm", "openvino", "llama.cpp")
BITS = (8, 4)
BASELINE_NAMES = ("no-kv-cache", "contiguous-kv", "static-batching", "padded-batches")


def add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, metavar="DIR", help="directory in Hugging Face layout")
    what.add_argument("--shape", choices=SHAPE_NAMES, default="0.5b", help="random model; 0.5b is the reference")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument(
        "--bits",
        type=int,
        choices=BITS,
        help="weights of every engine in so few bits: Tandem quantizes at load, peers each in their own way",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each engine; default: all cores")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument(
        "--peer", nargs="+", choices=PEER_NAMES, default=[], metavar="PEER", help=f"some of: {', '.join(PEER_NAMES)}"
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        choices=BASELINE_NAMES,
        default=[],
        metavar="NAME",
        help=f"gain of our own engine over: {', '.join(BASELINE_NAMES)}",
    )
    parser.add_argument("--full", action="store_true", help="all peers, more lengths, every part; tens of minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds; default: 1, with peers 3")
    parser.add_argument(
        "--set", action="append", default=[], metavar="engine.KEY=VALUE", help="setting of Tandem's engine section"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")


def parts(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the parts to measure: named, or implied by other options."""
    if options.only:
        return tuple(options.only)
    if options.full:
        return PARTS
    return ("baselines",) if options.baseline and not options.peer else MODEL_PARTS


def peers(options: argparse.Namespace) -> tuple[str, ...]:
    if options.peer or not options.full:
        return tuple(dict.fromkeys(options.peer))
    return tuple(name for name in PEER_NAMES if options.bits is None or name != "transformers")


def baselines(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the baselines to measure, if any."""
    return tuple(dict.fromkeys(options.baseline)) or BASELINE_NAMES
