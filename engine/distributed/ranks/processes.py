"""The other ranks' processes: started by one thread, which then watches them until the end.

The kernel ends them in two ways: a child asks for SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG), so
no rank survives rank 0; and its pidfd wakes the thread the moment it dies, whatever rank 0 is doing. One death ends
the others, so that no collective waits for the dead.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.distributed.links.lost import RankLost
from engine.distributed.ranks.group_end import GroupEnd

RANK_MODULE = __package__
"""Module that `python -m` runs as a rank: this package."""


def rank_command(module: str = RANK_MODULE) -> list[str]:
    """Command that starts a rank of this process, to be followed by arguments that name its group."""
    return [sys.executable, "-m", module, "--parent-pid", str(os.getpid())]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """Command that starts one rank."""

    rank: int
    argv: Sequence[str]
    fds: Sequence[int]
    """Descriptors that it inherits."""


class RankProcesses:
    """Processes of a group's ranks on this node, except rank 0."""

    def __init__(self, commands: Sequence[RankCommand], end: GroupEnd) -> None:
        """Start the ranks. The first death is reported to `end`, which `close` closes.

        Raises OSError when one cannot be started.
        """
        self._commands = commands
        self._end = end
        self._lock = threading.Lock()
        self._is_wanted_end = False
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._started = threading.Event()
        self._error: OSError | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pid_fds: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="tandem-ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self.close()
            raise self._error

    @property
    def pids(self) -> Mapping[int, int]:
        """Process id of each rank."""
        return {rank: child.pid for rank, child in self._children.items()}

    @property
    def statuses(self) -> Mapping[int, int]:
        """Exit status of each rank that has been reaped, as in `subprocess`."""
        return {rank: child.returncode for rank, child in self._children.items() if child.returncode is not None}

    def send(self, signum: signal.Signals) -> None:
        """Signal every rank that has not ended."""
        for child in self._children.values():
            child.send_signal(signum)

    def close(self) -> None:
        """Kill and reap all ranks: they hold nothing that outlives them."""
        with self._lock:
            if self._is_wanted_end:
                return
            self._is_wanted_end = True
        self._end.close()
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            for command in self._commands:
                # A session of its own: a terminal's Ctrl-C must reach rank 0 alone.
                child = subprocess.Popen(  # noqa: S603  # our own module, no shell
                    command.argv, stdin=subprocess.DEVNULL, pass_fds=tuple(command.fds), start_new_session=True
                )
                self._children[command.rank] = child
                self._pid_fds[os.pidfd_open(child.pid)] = command.rank
        except OSError as error:
            self._error = error
        self._started.set()
        dead = None if self._error is not None else self._wait()
        for fd in self._pid_fds:
            os.close(fd)
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
        if dead is not None:
            self._report(dead)

    def _wait(self) -> int | None:
        """Wait until a rank dies or `close` is called. Returns the dead rank, or None."""
        poll = select.poll()
        for fd in (self._stop_fd, *self._pid_fds):
            poll.register(fd, select.POLLIN)
        woken = {fd for fd, _ in poll.poll()}
        return None if self._is_wanted_end else self._pid_fds[min(woken)]

    def _report(self, rank: int) -> None:
        child = self._children[rank]
        self._end.report(RankLost(f"rank {rank} (pid {child.pid}) {_describe(child.returncode)}"))


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    return f"was ended by {signal.Signals(-status).name}"
