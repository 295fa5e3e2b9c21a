"""Options of `tandem autoscale`. Only what runs is imported, and only when it runs, so that help appears at once."""

from pathlib import Path
from typing import Annotated

import typer

_LIVE, _LOAD, _WORKERS, _PACE = (
    "Running cluster",
    "Simulated load",
    "Workers and objectives",
    "Bounds and damping",
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done and why.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; for a running cluster, one line per round.")]
Url = Annotated[
    list[str] | None,
    typer.Option(help="Router URL; may be repeated. A name may resolve to several.", rich_help_panel=_LIVE),
]
Socket = Annotated[Path | None, typer.Option(help="Control socket of [b]tandem up[/b].", rich_help_panel=_LIVE)]
Kubernetes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Inside a pod: scale StatefulSets NAME-prefill and NAME-decode.", rich_help_panel=_LIVE
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File with an operator's API key.", rich_help_panel=_LIVE),
]
Authority = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="PEM file of the routers' certificate authority.", rich_help_panel=_LIVE
    ),
]
OwnCert = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="PEM file of the client certificate and key.", rich_help_panel=_LIVE
    ),
]
Metrics = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Address of the planner's own metrics.", rich_help_panel=_LIVE)
]
Chat = Annotated[
    Path | None, typer.Option(help="Trace of short prompts (Azure's .csv), stretched to a day.", rich_help_panel=_LOAD)
]
Long = Annotated[
    Path | None,
    typer.Option(help="Trace of long prompts (Mooncake's .jsonl), stretched to a day.", rich_help_panel=_LOAD),
]
HourS = Annotated[float, typer.Option(min=1.0, help="Seconds per hour of the day.", rich_help_panel=_LOAD)]
OneTrace = Annotated[Path | None, typer.Option(help="One trace, replayed as it is.", rich_help_panel=_LOAD)]
Generate = Annotated[
    str, typer.Option(metavar="rate=4,requests=1000,...", help="Load generated from the seed.", rich_help_panel=_LOAD)
]
Prefill = Annotated[int, typer.Option(min=1, help="Prefill workers at the start.", rich_help_panel=_LOAD)]
Decode = Annotated[int, typer.Option(min=1, help="Decode workers at the start.", rich_help_panel=_LOAD)]
FlipS = Annotated[
    float, typer.Option(min=0.0, help="Seconds to restart a drained worker in the other role.", rich_help_panel=_LOAD)
]
DrainS = Annotated[float, typer.Option(min=0.0, help="Maximum seconds for a worker to drain.", rich_help_panel=_LOAD)]
BestFixed = Annotated[
    bool, typer.Option("--best-fixed", help="Also search for the best fixed schedule (slow).", rich_help_panel=_LOAD)
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same report.", rich_help_panel=_LOAD)]
Promised = Annotated[
    str, typer.Option(metavar="ttft=6,itl=0.1", help="Latency objectives, in seconds.", rich_help_panel=_WORKERS)
]
Latency = Annotated[
    str,
    typer.Option(
        help="Name or file of a profile, or FILE#ROW of a table; for a running cluster the speed is measured.",
        rich_help_panel=_WORKERS,
    ),
]
KvTokens = Annotated[
    int, typer.Option(min=1, help="KV tokens per worker; running workers report theirs.", rich_help_panel=_WORKERS)
]
MaxRunning = Annotated[int, typer.Option(min=1, help="Maximum sequences per step.", rich_help_panel=_WORKERS)]
Least = Annotated[str, typer.Option(metavar="P:D", help="Minimum workers per pool.", rich_help_panel=_PACE)]
Most = Annotated[int, typer.Option(min=2, help="Maximum workers of both pools together.", rich_help_panel=_PACE)]
PeriodS = Annotated[float, typer.Option(min=0.1, help="Seconds between two rounds.", rich_help_panel=_PACE)]
StartS = Annotated[
    float, typer.Option(min=0.0, help="Seconds from ordering a worker until it serves.", rich_help_panel=_PACE)
]
HoldS = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds that fewer workers must have sufficed before a pool shrinks.", rich_help_panel=_PACE
    ),
]


def autoscale(  # noqa: PLR0913  # one parameter per option
    *, dry_run: DryRun = False, url: Url = None, socket: Socket = None, kubernetes: Kubernetes = None,
    api_key_file: KeyFile = None, ca: Authority = None, client_cert: OwnCert = None, metrics: Metrics = None,
    chat: Chat = None, long: Long = None, hour_s: HourS = 3600.0, trace: OneTrace = None, generate: Generate = "",
    prefill: Prefill = 2, decode: Decode = 3, flip_s: FlipS = 10.0, drain_s: DrainS = 20.0,
    best_fixed: BestFixed = False, seed: Seed = 0, slo: Promised = "ttft=6,itl=0.1", latency: Latency = "small-gpu",
    kv_tokens: KvTokens = 45_000, max_running: MaxRunning = 64, least: Least = "1:1", most: Most = 64,
    period_s: PeriodS = 15.0, start_s: StartS = 180.0, hold_s: HoldS = 300.0, json_: Json = False,
) -> None:  # fmt: skip
    """Size both pools by a forecast, flipping warm workers before requesting new ones."""
    from cluster.autoscaler.command import LiveCommand, run_live, sizes_of
    from cluster.planner.values import Sizes
    from cluster.simulator.autoscale_command import AutoscaleOptions, autoscale_day
    from cluster.simulator.command import SimulateOptions
    from cluster.simulator.studies.fleet import FleetTiming

    options = AutoscaleOptions(
        is_dry_run=dry_run, chat=chat, long=long, hour_s=hour_s, period_s=period_s, hold_s=hold_s,
        timing=FleetTiming(start_s=start_s, flip_s=flip_s, drain_s=drain_s), most_workers=most, least=sizes_of(least),
        first=Sizes(prefill=prefill, decode=decode), against_best=best_fixed,
    )  # fmt: skip
    if chat or long or trace or generate:
        load = SimulateOptions(
            trace=trace, generate=generate, prefill=prefill, decode=decode, slo=slo, latency=latency,
            kv_tokens=kv_tokens, max_running=max_running, seed=seed, as_json=json_,
        )  # fmt: skip
        print(autoscale_day(load, options))
        return
    live = LiveCommand(
        urls=tuple(url or ()), socket=socket, kubernetes=kubernetes, api_key_file=api_key_file, ca=ca,
        client_cert=client_cert, is_dry_run=dry_run, as_json=json_, slo=slo, latency=latency, kv_tokens=kv_tokens,
        max_running=max_running, period_s=period_s, policy=options.policy(), metrics=metrics,
    )  # fmt: skip
    raise typer.Exit(run_live(live))
