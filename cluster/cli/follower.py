"""`tandem follower`: one node of a worker whose ranks span several nodes."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


def follower(
    role: Annotated[WorkerRole, typer.Argument(help="Pool of the worker.")],
    config: Annotated[Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="The cluster's YAML.")],
    index: Annotated[int, typer.Option("--index", "-i", min=0, help="Index of the worker in its pool.")] = 0,
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
    from worker.node_group import node_group

    loaded = load(config)
    configure(loaded.log_level, f"{role.value}-{index}-node-{node}", loaded.log_format)
    first = leader or worker_host(loaded, role, index)
    group = node_group(loaded, role, index, first, open_credentials(loaded.cluster.tls, (first,)))
    if group is None:
        raise ConfigError(f"{role.value}.nodes is 1: workers of this pool run on a single machine")
    raise typer.Exit(NodeStarter(group, node, source=host).run())
