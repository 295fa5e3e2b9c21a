"""The options of `tandem autoscale`. Only what runs is imported, and only when it runs: help must come at once."""

from pathlib import Path
from typing import Annotated

import typer


def autoscale(  # noqa: PLR0913  # one parameter per option
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate it and say why: all there is yet.")] = False,
    chat: Annotated[Path | None, typer.Option(help="Trace of short prompts for a day (Azure's .csv).")] = None,
    long: Annotated[Path | None, typer.Option(help="Trace of long prompts for a day (Mooncake's .jsonl).")] = None,
    hour_s: Annotated[float, typer.Option(min=1.0, help="Seconds that an hour of the day takes.")] = 3600.0,
    trace: Annotated[Path | None, typer.Option(help="One trace as it is, in place of a day.")] = None,
    generate: Annotated[str, typer.Option(metavar="rate=4,requests=1000,...", help="Load made from the seed.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers at the start.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers at the start.")] = 3,
    most: Annotated[int, typer.Option(min=2, help="Workers of both pools that there may be.")] = 64,
    slo: Annotated[str, typer.Option(metavar="ttft=6,itl=0.1", help="Promised seconds.")] = "ttft=6,itl=0.1",
    latency: Annotated[str, typer.Option(help="A profile's name or file, or FILE#ROW of a table.")] = "small-gpu",
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV that a worker's pool holds.")] = 45_000,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 64,
    period_s: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 15.0,
    start_s: Annotated[float, typer.Option(min=0.0, help="From an order to a worker that serves.")] = 180.0,
    flip_s: Annotated[float, typer.Option(min=0.0, help="From a drained worker to the other role.")] = 10.0,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Most that a worker has to finish.")] = 20.0,
    hold_s: Annotated[float, typer.Option(min=0.0, help="A pool shrinks to what was enough so long.")] = 300.0,
    best_fixed: Annotated[bool, typer.Option("--best-fixed", help="Search the best fixed schedule too: slow.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same report.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size both pools by a forecast, flipping warm workers before asking for new ones; [b]--dry-run[/b] says why."""
    from cluster.planner.values import Sizes
    from cluster.simulator.autoscale_command import AutoscaleOptions, autoscale_day
    from cluster.simulator.command import SimulateOptions
    from cluster.simulator.fleet import FleetTiming

    load = SimulateOptions(
        trace=trace, generate=generate, prefill=prefill, decode=decode, slo=slo, latency=latency, kv_tokens=kv_tokens,
        max_running=max_running, seed=seed, as_json=json_,
    )  # fmt: skip
    options = AutoscaleOptions(
        is_dry_run=dry_run, chat=chat, long=long, hour_s=hour_s, period_s=period_s, hold_s=hold_s,
        timing=FleetTiming(start_s=start_s, flip_s=flip_s, drain_s=drain_s), most_workers=most,
        first=Sizes(prefill=prefill, decode=decode), against_best=best_fixed,
    )  # fmt: skip
    print(autoscale_day(load, options))
