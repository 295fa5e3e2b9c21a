"""`tandem router`, `prefill`, `decode` and `follower`: one process of a cluster, for whoever starts each by itself."""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole

RequiredConfig = Annotated[
    Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="The cluster's YAML.")
]
IndexOption = Annotated[int, typer.Option("--index", "-i", min=0, help="Index of the worker in its pool.")]


def router(
    config: RequiredConfig,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", min=1, max=64, help="Number of processes sharing the ports ([b]router.processes[/b])."
        ),
    ] = None,
) -> None:
    """Run the router of the cluster that the YAML describes; with several processes, their supervisor."""
    from tandem.config.cluster import load

    again = partial(load, config, {"router.processes": workers})
    loaded = again()
    if loaded.router.processes == 1:
        return become(["router", "--config", str(config)])
    from rich.console import Console

    from cluster.cli.up import serve_routers

    raise typer.Exit(asyncio.run(serve_routers(loaded, console=Console(stderr=True, highlight=False), again=again)))


def prefill(config: RequiredConfig, index: IndexOption = 0) -> None:
    """Run a prefill worker, which reads prompts."""
    become(["prefill_worker", "--config", str(config), "--index", str(index)])


def decode(config: RequiredConfig, index: IndexOption = 0) -> None:
    """Run a decode worker, which writes answers."""
    become(["decode_worker", "--config", str(config), "--index", str(index)])


def follower(
    role: Annotated[WorkerRole, typer.Argument(help="Pool of the worker.")],
    config: RequiredConfig,
    index: IndexOption = 0,
    node: Annotated[int, typer.Option(min=1, help="Index of this node; the worker's own node is 0.")] = 1,
    leader: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host of the worker; default: as configured.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of this node for the others; default: the one used to reach the worker.")
    ] = None,
) -> None:
    """Run the ranks of a worker that belong on this node, and restart them when the worker ends."""
    from engine.distributed.ranks.node_starter import NodeStarter
    from tandem.config.cluster import load
    from tandem.config.worker import worker_host
    from tandem.rpc.cluster_credentials import open_credentials
    from tandem.telemetry.logs import configure
    from worker.node_group import RANK_MODULE, node_group

    loaded = load(config)
    configure(loaded.log_level, f"{role.value}-{index}-node-{node}", loaded.log_format)
    first = leader or worker_host(loaded, role, index)
    group = node_group(loaded, role, index, first, open_credentials(loaded.cluster.tls, (first,)))
    if group is None:
        raise ConfigError(f"{role.value}.nodes is 1: workers of this pool run on a single machine")
    raise typer.Exit(NodeStarter(group, node, source=host, module=RANK_MODULE).run())


def become(module_and_arguments: list[str]) -> None:
    """Replace this process, so that signals and exit code are those of the module, as a container expects."""
    from cluster.processes.effective_config import GRPC_WITHOUT_FORK, import_root

    environment = {**GRPC_WITHOUT_FORK, **os.environ}
    if root := import_root():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    sys.stdout.flush()
    command = [sys.executable, "-m", *module_and_arguments]
    os.execve(sys.executable, command, environment)  # noqa: S606  # our own interpreter, no shell
