import gc
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cluster.processes.launcher import Command
from tests.proofs.kills.fork_server import start_fork_servers
from tests.support.oracle import Oracle

pytest.register_assert_rewrite(
    *(f"tests.e2e.settings.{name}" for name in ("row", "engine_rows", "router_rows", "access_rows"))
)


class ForkServers(NamedTuple):
    """How workers start without the wait, and where they are watched (`tests.proofs.kills.watched`)."""

    folder: Path
    command: Command


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory):
    """For clusters whose workers' own start is not what is tested."""
    folder = tmp_path_factory.mktemp("w")
    with start_fork_servers(folder) as command:
        yield ForkServers(folder, command)


@pytest.fixture(scope="session")
def oracle():
    """`transformers` on one thread: the clusters need the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of itself while it loads
        made = Oracle()
    yield made
    torch.set_num_threads(threads)
    gc.collect()
