"""Local clusters of fake processes; run as `fake_cluster.py JOURNAL [NAME=MODE …]`, a `tandem up` of them."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from cluster.cli.up import run_with
from cluster.processes.launcher import Command
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.supervisor import ProcessPlan
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.config.pools import PoolConfig
from tandem.errors import ConfigError

FAKE = Path(__file__).with_name("fake_process.py")


def fake_config(*, prefill: int = 1, decode: int = 1, drain_s: float = 5.0) -> ClusterConfig:
    """Return a configuration whose ports are all chosen by the system."""
    return ClusterConfig(
        router=RouterConfig(port=0, grpc_port=0),
        prefill=PoolConfig(replicas=prefill, drain_s=drain_s),
        decode=PoolConfig(replicas=decode, drain_s=drain_s),
    )


def fake_command(journal: Path, modes: Mapping[str, str] | None = None) -> Command:
    """Starts `fake_process.py` in the mode named for it."""

    def command(plan: ProcessPlan, config: Path, ready_fd: int) -> list[str]:
        mode = (modes or {}).get(plan.name, "ok")
        return [sys.executable, "-I", "-S", str(FAKE), plan.name, str(ready_fd), str(journal), mode, str(config)]

    return command


async def _up(journal: Path, modes: dict[str, str]) -> int:
    async def body(cluster: LocalCluster) -> int:
        print("serving", flush=True)  # the test waits for it
        await cluster.wait_stopped()
        return 0

    def again() -> ClusterConfig:
        """What a user has written meanwhile: something that may change while it runs, and something that may not."""
        if any(mode == "spoilt" for mode in modes.values()):
            raise ConfigError("log_level: must be a level")
        return fake_config(decode=7).model_copy(update={"log_level": "debug"})

    config, console, command = fake_config(), Console(stderr=True), fake_command(journal, modes)
    return await run_with(config, body, console=console, show_logs=True, command=command, again=again)


if __name__ == "__main__":
    sys.exit(asyncio.run(_up(Path(sys.argv[1]), dict(pair.split("=") for pair in sys.argv[2:]))))
