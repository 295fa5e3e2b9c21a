"""Drives one engine in a process of its own through host.py's protocol: start, jobs one at a time, stop."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from tandem_bench.errors import CannotMeasure

HERE = Path(__file__).parent
_MAX_LINE_BYTES = 256 << 20
_STOP_S = 20.0
_LAST_WORDS = 1500


class EngineProcessFailed(CannotMeasure):
    """An engine's process ended or answered with an error; the message has its last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command and options of one engine's process."""

    name: str
    python: Path
    adapter: str
    """File name of the adapter in the folder of host.py, or an absolute path."""
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: Path = HERE / "host.py"
    """Program that the process runs; it answers each line with one line."""
    start_timeout_s: float = 600.0
    job_timeout_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Engine that is ready for jobs."""

    ready_s: float
    """Time from the process's start; for Tandem and its peers alike this includes importing libraries."""
    load_s: float
    """Part of that for making the engine ready: weights, compiling, memory."""
    about: Mapping[str, Any]


class EngineProcess:
    """One process: `spawn`, `ready`, then `run` as often as wanted, then `stop`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: asyncio.subprocess.Process | None = None
        self._spawned_s = 0.0
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed by `stop`

    @property
    def pid(self) -> int:
        """Id of the process. Raises EngineProcessFailed before `spawn`."""
        return self._running().pid

    async def spawn(self) -> None:
        """Start the process, without waiting for its engine. Raises OSError."""
        launch = self._launch
        self._spawned_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            str(launch.python),
            "-P",  # the host's folder must not be on the import path
            str(launch.host),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            env=_environment() | dict(launch.environment),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )

    async def ready(self) -> Started:
        """Send the engine its options and wait until it accepts jobs. Raises EngineProcessFailed."""
        file = str(HERE / self._launch.adapter)
        ready = await self._ask({"file": file, **self._launch.options}, self._launch.start_timeout_s)
        return Started(ready_s=time.monotonic() - self._spawned_s, load_s=ready["load_s"], about=ready["about"])

    async def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job and return its answer. Raises EngineProcessFailed."""
        return await self._ask(job, self._launch.job_timeout_s)

    async def stop(self) -> None:
        """End the process, whatever its state."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._log.close()

    async def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._running()
        if process.stdin is None or process.stdout is None:
            raise EngineProcessFailed(f"{self._launch.name} has no pipes")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(message).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise self._failure(f"no answer within {timeout_s:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            raise self._failure("its process has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise EngineProcessFailed(f"{self._launch.name} is not running")
        return self._process

    def _failure(self, what: str) -> EngineProcessFailed:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace")[-_LAST_WORDS:].strip()
        return EngineProcessFailed(f"{self._launch.name}: {what}\n{words}")


def _environment() -> dict[str, str]:
    """Return our environment without variables that affect engines: only the options may do so."""
    steering = ("TANDEM_", "VLLM_", "OMP_", "KMP_", "GOMP_", "PYTHON", "LD_PRELOAD", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    # Nothing may use the network while something is measured.
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
