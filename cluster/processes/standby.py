"""Standby workers: processes that have imported everything a worker needs, and wait to become one.

Importing PyTorch takes most of a worker's start, about two seconds of processor time; a standby replaces a dead worker
without that delay. `python -m cluster.processes.standby --ready-fd N` is such a process: it reads its role and
arguments from stdin as one JSON line, and then becomes that worker, whose name `ps` shows.
"""

import argparse
import asyncio
import ctypes
import importlib
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.processes.child import Callbacks, Child
from tandem.values.roles import WorkerRole

CALM_S = 1.0
"""Delay from the moment that no process is starting until a standby starts, so that it slows none of them down."""
MAX_FAILURES = 3
"""Maximum number of standbys that end by themselves before no more are started."""
_ROOM = " " * 512
"""Last argument of a standby, which makes room for overwriting its command line with the worker's."""
_ARG_START, _ARG_END = 45, 46
"""Indices of these fields of /proc/PID/stat, counted after the name."""
_log = logging.getLogger(__name__)


class StandbyWorkers:
    """Pool of a fixed number of standbys, replaced as they are used. Needs a running event loop."""

    def __init__(self, count: int, environment: Callable[[], Mapping[str, str]]) -> None:
        self._count = count
        self._environment = environment
        self._waiting: deque[_Standby] = deque()
        self._starting: set[str] = set()
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the waiting standbys."""
        return [standby.child.pid for standby in self._waiting]

    def observed(self, name: str, callbacks: Callbacks) -> Callbacks:
        """Wrap the callbacks of a process that starts now; standbys are started when no process is starting."""
        self._starting.add(name)
        self._cancel()

        def on_ready(facts: Mapping[str, object]) -> None:
            self._settled(name)
            callbacks.on_ready(facts)

        def on_exit(status: int) -> None:
            self._settled(name)
            callbacks.on_exit(status)

        return replace(callbacks, on_ready=on_ready, on_exit=on_exit)

    def start(self, role: WorkerRole, arguments: Sequence[str], callbacks: Callbacks) -> Child | None:
        """Turn a standby into the worker with these arguments; None when there is none."""
        while self._waiting:
            standby = self._waiting.popleft()
            if standby.become(role, arguments, callbacks):
                return standby.child
        return None

    def close(self) -> None:
        """Kill the waiting standbys and start no more."""
        self._is_closed = True
        self._cancel()
        self.discard()

    def discard(self) -> None:
        """Kill the waiting standbys; others are started when no process is starting."""
        while self._waiting:
            self._waiting.popleft().child.discard()

    def _settled(self, name: str) -> None:
        self._starting.discard(name)
        if not self._starting and not self._is_closed:
            self._cancel()
            self._timer = asyncio.get_running_loop().call_later(CALM_S, self._refill)

    def _refill(self) -> None:
        self._timer = None
        while len(self._waiting) < self._count and self._failures < MAX_FAILURES:
            try:
                self._waiting.append(_Standby(self._environment(), self._ended))
            except OSError as error:  # out of processes or memory
                self._failed(f"cannot start a standby worker: {error}")

    def _ended(self, standby: "_Standby", status: int) -> None:
        if standby in self._waiting:
            self._waiting.remove(standby)
            self._failed(f"a standby worker ended by itself with status {status}")
            self._refill()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures < MAX_FAILURES:
            _log.warning("%s; starting another one", reason)
        else:
            _log.error(
                "%s, the last of %d: no more are started, and replacing a worker that dies takes longer now",
                reason,
                MAX_FAILURES,
            )

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Standby:
    """Standby process that waits until `become`."""

    def __init__(self, environment: Mapping[str, str], on_end: Callable[["_Standby", int], None]) -> None:
        """Raises OSError when it cannot be started."""
        self._callbacks: Callbacks | None = None
        self._on_end = on_end
        self.child = Child(_command, environment, self._relay(), takes_stdin=True)

    def become(self, role: WorkerRole, arguments: Sequence[str], callbacks: Callbacks) -> bool:
        """Tell the process which worker it is; False when it no longer runs."""
        self._callbacks = callbacks
        line = json.dumps({"role": role.value, "arguments": list(arguments)}) + "\n"
        if not self.child.write_stdin(line.encode()):
            self.child.discard()
            return False
        return True

    def _relay(self) -> Callbacks:
        """Forward events to the callbacks of the worker that it becomes; its earlier log lines are logged here."""

        def to(name: str) -> Callable[..., None]:
            def call(*values: Any) -> None:
                if self._callbacks is not None:
                    getattr(self._callbacks, name)(*values)
                elif name == "on_exit":
                    self._on_end(self, *values)
                elif name == "on_log":
                    _log.warning("standby: %s", *values)

            return call

        return Callbacks(
            on_loading=to("on_loading"),
            on_ready=to("on_ready"),
            on_beat=to("on_beat"),
            on_news=to("on_news"),
            on_log=to("on_log"),
            on_exit=to("on_exit"),
        )


def _command(ready_fd: int) -> list[str]:
    return [sys.executable, "-m", "cluster.processes.standby", "--ready-fd", str(ready_fd), _ROOM]


def _show_command_line(arguments: Sequence[str]) -> None:
    """Have `ps` show these arguments instead of those the process was started with, as far as there is room.

    The kernel reads a command line from the memory of its process, between two addresses that stay as they are.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, num_bytes = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    if start and num_bytes > 0:
        shown = os.fsencode("\0".join(arguments)) + b"\0"
        ctypes.memmove(start, shown[: num_bytes - 1].ljust(num_bytes - 1) + b"\0", num_bytes)


def main() -> None:
    """Import, wait, and become a worker. Ends when stdin closes without a line."""
    from tandem.process.lifetime import end, worker_main

    parser = argparse.ArgumentParser(prog="standby", description="a standby process that becomes a worker on request")
    parser.add_argument("--ready-fd", required=True)
    parser.add_argument("room", nargs="?", help="blanks that the worker's command line overwrites")
    ready_fd: str = parser.parse_args().ready_fd
    serves = {role: importlib.import_module(f"{role.value}_worker.__main__").serve for role in WorkerRole}
    line = sys.stdin.readline()
    if not line:
        end(0)
    order = json.loads(line)
    role = WorkerRole(order["role"])
    arguments = [*order["arguments"], "--ready-fd", ready_fd]
    _show_command_line([sys.executable, "-m", f"{role.value}_worker", *arguments])
    sys.argv = [f"{role.value}_worker", *arguments]
    end(worker_main(role, serves[role]))


if __name__ == "__main__":
    main()
