"""On every node of a worker but rank 0's: starts the node's ranks, and starts them anew when they have ended.

The ranks come to rank 0 by themselves, now or when there is one, and end with it; so whoever comes after it, at the
same address, finds them knocking again. SIGTERM means that no rank is started any more: those that follow rank 0 end
when it has finished its work, those that still knock end at once.
"""

import logging
import os
import signal
import sys
import threading

from engine.ranks.ending import GroupEnd
from engine.ranks.joining import REFUSED
from engine.ranks.nodes import NodeGroup
from engine.ranks.processes import RankCommand, RankProcesses

_log = logging.getLogger(__name__)
_EXIT_S = 10.0
_AGAIN_S = 1.0


class NodeStarter:
    """One node's, on the process's first thread."""

    def __init__(self, group: NodeGroup, node: int, *, source: str | None = None) -> None:
        """`source`: address of this node for the other ranks; None: the one by which it reaches rank 0.

        Raises ConfigError for a node that the group does not have.
        """
        self._group = group
        self._ranks = group.ranks_of(node)
        self._source = source
        self._turned = threading.Event()
        self._is_stopping = False
        self._is_impatient = False
        self._processes: RankProcesses | None = None

    def run(self) -> int:
        """Until SIGTERM or SIGINT, or a refusal; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while not self._is_stopping:
            statuses = self._run_once()
            if REFUSED in statuses.values():
                return REFUSED
            if not self._is_stopping:
                _log.info("the ranks of this node have ended with their worker; they are started again")
                self._turned.wait(_AGAIN_S)
                self._turned.clear()
        return 0

    def _run_once(self) -> dict[int, int]:
        """One life of the node's ranks: how each ended."""
        end = GroupEnd(exit_s=_EXIT_S, is_expected=True)
        end.watch(lambda _lost: self._turned.set())
        commands = self._commands()
        try:
            processes = self._processes = RankProcesses(commands, end)
        finally:
            for command in commands:
                os.close(command.fds[0])
        if self._is_stopping:  # a signal came while they were started
            self._ask_to_stop()
        while end.lost is None and not self._is_impatient:
            self._turned.wait()
            self._turned.clear()
        self._processes = None
        processes.close()
        return dict(processes.statuses)

    def _commands(self) -> list[RankCommand]:
        commands = []
        for rank in self._ranks:
            # A file of its own: whoever reads it moves its position.
            fd = os.memfd_create("tandem-group")
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(self._group.to_json())
            os.lseek(fd, 0, os.SEEK_SET)
            argv = [sys.executable, "-m", "engine.ranks", "--parent-pid", str(os.getpid())]
            argv += ["--join-fd", str(fd), "--rank", str(rank)]
            if self._source is not None:
                argv += ["--host", self._source]
            commands.append(RankCommand(rank=rank, argv=argv, fds=(fd,)))
        return commands

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._is_impatient = self._is_stopping
        self._is_stopping = True
        self._ask_to_stop()
        self._turned.set()

    def _ask_to_stop(self) -> None:
        """Those that still knock end; those that follow rank 0 do not listen."""
        if self._processes is not None:
            self._processes.send(signal.SIGTERM)
