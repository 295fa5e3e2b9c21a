"""The options of `tandem simulate` and `tandem plan`. Only what runs is imported, and only when it runs."""

from pathlib import Path
from typing import Annotated

import typer


def simulate(  # noqa: PLR0913  # one parameter per option
    *,
    trace: Annotated[Path | None, typer.Option(help="Mooncake's .jsonl or Azure's .csv.")] = None,
    generate: Annotated[str, typer.Option(metavar="rate=4,requests=1000,...", help="Load made from the seed.")] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Only so many of the trace.")] = None,
    speed: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    slo: Annotated[str, typer.Option(metavar="ttft=2,itl=0.1", help="Promised seconds.")] = "",
    policy: Annotated[list[str] | None, typer.Option(help="How workers are chosen; repeat, or `all`.")] = None,
    latency: Annotated[str, typer.Option(help="A profile's name or file, or FILE#ROW of a table.")] = "example",
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV that a worker's pool holds.")] = 400_000,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 256,
    link_gbytes: Annotated[float, typer.Option(min=0.001, help="GB/s of a worker's card.")] = 25.0,
    faults: Annotated[str, typer.Option(metavar="crash=3,freeze=2", help="Workers that fail.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same report.")] = 0,
    sweep: Annotated[bool, typer.Option("--sweep", help="The same workers as every ratio of pools.")] = False,
    placement: Annotated[bool, typer.Option("--placement", help="Hit rate and queueing alone.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plots: Annotated[Path | None, typer.Option(help="A folder for pictures.")] = None,
) -> None:
    """Run a cluster on a virtual clock: the real router and schedulers, with workers as latencies."""
    from cluster.simulator import command

    options = command.SimulateOptions(
        trace=trace,
        generate=generate,
        requests=requests,
        speed=speed,
        prefill=prefill,
        decode=decode,
        slo=slo,
        policies=tuple(policy) if policy else command.SimulateOptions().policies,
        latency=latency,
        kv_tokens=kv_tokens,
        max_running=max_running,
        link_gbytes=link_gbytes,
        faults=faults,
        seed=seed,
        sweep=sweep,
        placement=placement,
        as_json=json_,
        plots=plots,
    )
    print(command.simulate(options))


def plan(  # one parameter per option
    *,
    worker: Annotated[
        list[str], typer.Option(metavar="gpus=8,kv_tokens=N,latency=PROFILE", help="PROFILE: `example` or a file.")
    ],
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences in one step; repeat.")] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="Do not look beyond.")] = 64,
    trace: Annotated[Path | None, typer.Option(help="Mooncake's .jsonl or Azure's .csv.")] = None,
    generate: Annotated[str, typer.Option(metavar="rate=4,requests=1000,...", help="Load made from the seed.")] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Only so many of the trace.")] = 500,
    speed: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0,
    slo: Annotated[str, typer.Option(metavar="ttft=2,itl=0.1", help="Promised seconds.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the cheapest cluster that keeps a promise for a load, by simulation; [b]--worker[/b] may be repeated."""
    from cluster.simulator.command import PlanOptions, SimulateOptions, plan_cluster

    load = SimulateOptions(
        trace=trace, generate=generate, requests=requests, speed=speed, slo=slo, seed=seed, as_json=json_
    )
    limits = tuple(batch) if batch else (256,)
    print(plan_cluster(PlanOptions(load=load, workers=tuple(worker), batch_limits=limits, max_gpus=max_gpus)))
