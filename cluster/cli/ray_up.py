"""`tandem up --ray`: runs a cluster like `tandem up`, with its workers on the nodes of a Ray cluster."""

import asyncio

from rich.console import Console
from rich.text import Text

from cluster.cli.up import Again, serve
from cluster.ray.launcher import RayLauncher
from cluster.ray.session import connect
from tandem.config.cluster import ClusterConfig
from tandem.model_path import is_local_model


def serve_on_ray(config: ClusterConfig, address: str, *, out: Console, err: Console, again: Again | None = None) -> int:
    """Run the cluster until the user ends it, and return the exit code. Raises ConfigError before anything is started.

    Call this on the main thread, outside any event loop.
    """
    with connect(address) as session:
        if session.warning is not None:
            err.print(Text(f"warning: {session.warning}", style="bold yellow"), soft_wrap=True)
        launcher = RayLauncher(session, model_path=_hub_id(config.model.path))
        return asyncio.run(serve(config, out=out, err=err, launcher=launcher, again=again))


def _hub_id(path: str) -> str | None:
    """Return the hub id that nodes download the model by; local files must exist there under the same name."""
    return None if is_local_model(path) else path
