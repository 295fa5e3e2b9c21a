"""`python -m tandem_bench SUBJECT`: measure Tandem and print the figures. `tandem bench` runs this."""

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tandem.errors import ConfigError
from tandem_bench import report
from tandem_bench.adapters import options as adapter_options
from tandem_bench.engine import options as engine_options
from tandem_bench.errors import CannotMeasure, require_extra
from tandem_bench.report import Row
from tandem_bench.router import options as router_options
from tandem_bench.transfer import options as transfer_options


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tandem bench",
        description="Measure Tandem and print the figures.",
        epilog="Exit code: 1 if a goal was missed (possible on a busy machine), 2 if something could not be measured.",
    )
    subjects = made.add_subparsers(dest="subject", required=True)
    spine = subjects.add_parser("spine", help="parity with transformers, start-up, latency, the model's own gates")
    scales = spine.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="a sample of each figure, in under a minute")
    scales.add_argument("--full", action="store_true", help="parity in every combination; takes about twice as long")
    spine.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help=f"some of: {', '.join(PARTS)}")
    spine.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    engine = subjects.add_parser("engine", help="speed against this machine's limits, peers, baselines; 55 s at most")
    engine_options.add_options(engine)
    transfer = subjects.add_parser("transfer", help="KV between two processes against the machine's limits and peers")
    transfer_options.add_options(transfer)
    router = subjects.add_parser("router", help="cost of the router itself, and of its decisions")
    router_options.add_options(router)
    telemetry = subjects.add_parser("telemetry", help="cost of traces, scrapes and logs in a cluster; 4 minutes")
    _add_telemetry_options(telemetry)
    recovery = subjects.add_parser("recovery", help="pauses of a stream after processes are killed; 3 minutes")
    recovery.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds per case; default: 3")
    recovery.add_argument(
        "--standby", type=int, metavar="N", help="value of `standby_workers`; default: that of the configuration"
    )
    recovery.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    _add_soak_options(subjects.add_parser("soak", help="growth of every process under a mixed load; two hours"))
    isolation = subjects.add_parser("isolation", help="what TTFT tells one tenant of another's prompts; 3 minutes")
    _add_isolation_options(isolation)
    adapters = subjects.add_parser("adapters", help="what LoRA adapters cost, and where their requests land; 3 minutes")
    adapter_options.add_options(adapters)
    scale = subjects.add_parser("scale", help="a thousand workers, thousands of streams, and storms; 8 minutes")
    _add_scale_options(scale)
    return made


def _add_isolation_options(parser: argparse.ArgumentParser) -> None:
    probes, control = 2000, 200
    parser.add_argument(
        "--probes",
        type=_even,
        default=probes,
        metavar="N",
        help=f"prefixes that the attacker tries, half of which the victim has sent; default: {probes}",
    )
    parser.add_argument(
        "--control", type=_even, default=control, metavar="N", help=f"the same within one tenant; default: {control}"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts; default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def _even(text: str) -> int:
    value = int(text)
    if value < 2 or value % 2:
        raise argparse.ArgumentTypeError(f"must be an even number of at least 2, got {text}")
    return value


def _add_soak_options(parser: argparse.ArgumentParser) -> None:
    minutes, rate, kill_every_s = 120.0, 10.0, 90.0
    parser.add_argument(
        "--minutes",
        type=_above_zero,
        default=minutes,
        metavar="M",
        help=f"how long, of which a sixth, and at least 5.5 minutes, is warm-up; default: {minutes:g}",
    )
    parser.add_argument(
        "--rate", type=_above_zero, default=rate, metavar="R", help=f"requests per second; default: {rate:g}"
    )
    parser.add_argument(
        "--kill-every",
        type=_above_zero,
        default=kill_every_s,
        metavar="S",
        help=f"seconds between two kills of a worker; default: {kill_every_s:g}",
    )
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="write each process's samples to this file: its growth over time"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the load; default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def _add_scale_options(parser: argparse.ArgumentParser) -> None:
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


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _add_telemetry_options(parser: argparse.ArgumentParser) -> None:
    seconds, turn_s, parts = 180.0, 2.0, TELEMETRY_PARTS
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"some of: {', '.join(parts)}")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help=f"total time of the rounds; a started round is finished; default: {seconds:g}",
    )
    parser.add_argument(
        "--turn", type=float, default=turn_s, metavar="S", help=f"time of each load in a turn; default: {turn_s:g}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")


def main() -> int:
    """Parse the command line, measure and report; return 1 when a goal was missed, 2 when a measurement failed."""
    parsing = parser()
    options = parsing.parse_args()
    for file in (options.json, getattr(options, "plot", None), getattr(options, "samples", None)):
        if file is not None and not file.absolute().parent.is_dir():
            parsing.error(f"{file}: no such directory")
    if (folder := getattr(options, "flames", None)) is not None and not folder.is_dir():
        parsing.error(f"--flames {folder}: no such directory")

    err = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    try:
        _require_extras(options)
        asyncio.run(_ended_by_sigterm(_SUBJECTS[options.subject](options, rows, err)))
    except (CannotMeasure, ConfigError) as error:
        err.print(Text(str(error), style="red"), soft_wrap=True)
        return EXIT_CANNOT_MEASURE
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    finally:
        if options.json is not None:
            report.write_json(options.json, rows, about=report.circumstances(["tandem", "bench", *sys.argv[1:]]))
    return 1 if report.num_missed(rows) else 0


def _require_extras(options: argparse.Namespace) -> None:
    """Check for required packages before minutes are spent on measuring. Raises ExtraMissing."""
    if (module := _SUBJECT_EXTRAS.get(options.subject)) is not None:
        require_extra(module, f"tandem bench {options.subject}")
    if getattr(options, "plot", None) is not None:
        require_extra("matplotlib", "--plot")


async def _ended_by_sigterm(work: Coroutine[None, None, None]) -> None:
    """End the work on SIGTERM as on Ctrl-C: started processes must not outlive this one."""
    task = asyncio.current_task()
    if task is not None:
        # The loop's own handler wakes the loop, whatever it is about to wait for.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


async def _spine(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    """Measure part by part, adding to `rows`, so that a later failure loses nothing."""
    from tandem_bench.spine.measure import Scale, measure

    scale = Scale.quick() if options.quick else Scale.full() if options.full else Scale()
    parts = options.only or (QUICK_PARTS if options.quick else PARTS)
    if "gates" in parts and find_spec("training") is None:
        if options.only:
            raise CannotMeasure("gates: they are in `training`, which only a clone of the repository has")
        err.print("[dim]gates: left out; they are in `training`, which only a clone of the repository has[/dim]")
        parts = [part for part in parts if part != "gates"]
    try:
        async for part in measure(scale, parts, err):
            rows += part
    finally:
        report.print_table(_out(), rows)


async def _engine(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.engine.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _transfer(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.transfer.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _router(options: argparse.Namespace, rows: list[Row], _err: Console) -> None:
    from tandem_bench.router.measure import measure

    await measure(options, rows, out=_out())


async def _telemetry(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.telemetry.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _recovery(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.recovery import measure

    await measure(options, rows, out=_out(), err=err)


async def _soak(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.soak.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _isolation(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.isolation.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _adapters(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.adapters.measure import measure

    await measure(options, rows, out=_out(), err=err)


async def _scale(options: argparse.Namespace, rows: list[Row], err: Console) -> None:
    from tandem_bench.scale.measure import measure

    await measure(options, rows, out=_out(), err=err)


def _out() -> Console:
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=WIDTH)


EXIT_CANNOT_MEASURE = 2
EXIT_INTERRUPTED = 130
WIDTH = 120
"""Width of a table in a file or a pipe."""
PARTS = ("logits", "gates", "startup", "speed", "parity", "bf16")
QUICK_PARTS = PARTS[:-1]
"""bf16 has no goal, and the fewer prompts, the less its rate says."""
TELEMETRY_PARTS = ("spans", "router", "cluster")
_SUBJECTS: Mapping[str, Callable[[argparse.Namespace, list[Row], Console], Coroutine[None, None, None]]] = {
    "spine": _spine,
    "engine": _engine,
    "transfer": _transfer,
    "router": _router,
    "telemetry": _telemetry,
    "recovery": _recovery,
    "soak": _soak,
    "isolation": _isolation,
    "adapters": _adapters,
    "scale": _scale,
}
_SUBJECT_EXTRAS: Mapping[str, str] = {"spine": "transformers", "telemetry": "opentelemetry.proto"}
"""Packages of the extra `bench` that each subject needs."""

if __name__ == "__main__":
    sys.exit(main())
