"""Switches the telemetry of running processes: rewrites their YAML and sends SIGHUP."""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

SETTLED_S = 0.5
"""Reading a YAML takes some hundredths of a second; spans of the turn before leave within this, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One telemetry setup of a cluster."""

    name: str
    sample_ratio: float = 0.0
    is_watched: bool = True
    """With a scrape each second, and a JSON log at `info`; else neither, and what is logged is warnings."""
    goal: float | None = None

    def rewrite(self, path: Path) -> None:
        """Write this setup into a configuration file and leave the rest of it as it is."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content["telemetry"]["sample_ratio"] = self.sample_ratio
        level, style = ("info", "json") if self.is_watched else ("warning", "text")
        content |= {"log_level": level, "log_format": style}
        written = path.with_suffix(".new")
        written.touch(mode=0o600)
        written.write_text(yaml.safe_dump(content), encoding="utf-8")
        written.replace(path)


OFF = Kind(name="off", is_watched=False)


async def switch(processes: Mapping[str, psutil.Process], kind: Kind) -> None:
    """Rewrite the configuration of all processes and have them reload it."""
    for path in {_config(process) for process in processes.values()}:
        kind.rewrite(path)
    for process in processes.values():
        os.kill(process.pid, signal.SIGHUP)
    await asyncio.sleep(SETTLED_S)


def _config(process: psutil.Process) -> Path:
    command = process.cmdline()
    return Path(command[command.index("--config") + 1])
