"""Options of `tandem simulate` and `tandem plan`. Only what runs is imported, and only when it runs."""

from pathlib import Path
from typing import Annotated

import typer


def simulate(  # noqa: PLR0913  # one parameter per option
    *,
    trace: Annotated[Path | None, typer.Option(help="Trace file: Mooncake's .jsonl or Azure's .csv.")] = None,
    generate: Annotated[
        str, typer.Option(metavar="rate=4,requests=1000,...", help="Load generated from the seed.")
    ] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
    speed: Annotated[float, typer.Option(help="Factor by which arrivals are sped up.")] = 1.0,
    prefill: Annotated[int, typer.Option(min=0, help="Number of prefill workers; 0: colocated.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode workers.")] = 1,
    slo: Annotated[str, typer.Option(metavar="ttft=2,itl=0.1", help="Latency objectives, in seconds.")] = "",
    policy: Annotated[
        list[str] | None, typer.Option(help="Placement policy; may be repeated; `all` for all of them.")
    ] = None,
    latency: Annotated[str, typer.Option(help="Name or file of a profile, or FILE#ROW of a table.")] = "example",
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV tokens per worker.")] = 400_000,
    max_running: Annotated[int, typer.Option(min=1, help="Maximum sequences per step.")] = 256,
    link_gbytes: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth of a worker's network card, in GB/s.")
    ] = 25.0,
    faults: Annotated[str, typer.Option(metavar="crash=3,freeze=2", help="Faults to inject into workers.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same report.")] = 0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare all ratios of prefill to decode workers.")] = False,
    placement: Annotated[bool, typer.Option("--placement", help="Measure hit rate and queueing only.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Directory for plots.")] = None,
) -> None:
    """Simulate a cluster on a virtual clock: the real router and schedulers, with latency models as workers."""
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
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Maximum sequences per step; may be repeated.")] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="Maximum number of GPUs.")] = 64,
    trace: Annotated[Path | None, typer.Option(help="Trace file: Mooncake's .jsonl or Azure's .csv.")] = None,
    generate: Annotated[
        str, typer.Option(metavar="rate=4,requests=1000,...", help="Load generated from the seed.")
    ] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = 500,
    speed: Annotated[float, typer.Option(help="Factor by which arrivals are sped up.")] = 1.0,
    slo: Annotated[str, typer.Option(metavar="ttft=2,itl=0.1", help="Latency objectives, in seconds.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the cheapest cluster that meets the objectives for a load, by simulation; [b]--worker[/b] may repeat."""
    from cluster.simulator.command import PlanOptions, SimulateOptions, plan_cluster

    load = SimulateOptions(
        trace=trace, generate=generate, requests=requests, speed=speed, slo=slo, seed=seed, as_json=json_
    )
    limits = tuple(batch) if batch else (256,)
    print(plan_cluster(PlanOptions(load=load, workers=tuple(worker), batch_limits=limits, max_gpus=max_gpus)))
