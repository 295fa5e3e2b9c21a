"""`tandem follower`: a node of a worker whose ranks are spread over several."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


def follower(
    role: Annotated[WorkerRole, typer.Argument(help="The worker's pool.")],
    config: Annotated[Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="The cluster's YAML.")],
    index: Annotated[int, typer.Option("--index", "-i", min=0, help="Which worker of the pool.")] = 0,
    node: Annotated[int, typer.Option(min=1, help="Which of the worker's nodes this is; its own is 0.")] = 1,
    leader: Annotated[
        str | None, typer.Option(metavar="HOST", help="Where the worker runs; as the configuration says when absent.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="This node's address for the others; that by which it reaches the worker.")
    ] = None,
) -> None:
    """Be one more node of a worker: start its ranks here, which join the worker, and start them anew when it ends."""
    from engine.distributed.ranks.node_starter import NodeStarter
    from tandem.config.cluster import load
    from tandem.config.worker import worker_host
    from tandem.telemetry.logs import configure
    from worker.node_group import node_group

    loaded = load(config)
    configure(loaded.log_level, f"{role.value}-{index}-node-{node}", loaded.log_format)
    group = node_group(loaded, role, index, leader or worker_host(loaded, role, index))
    if group is None:
        raise ConfigError(f"{role.value}.nodes is 1: a worker of this pool is all on one machine")
    raise typer.Exit(NodeStarter(group, node, source=host).run())
