"""Starts the ranks of a node without rank 0, and starts them again when they have ended.

The ranks connect to rank 0 by themselves, however late it starts, and end with it; so its successor at the same
address finds them connecting again. After SIGTERM no rank is started any more: those that follow rank 0 end when it has
finished its work, those that are not connected yet end at once.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue

from engine.distributed.links.joining import REFUSED
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.ranks.processes import RANK_MODULE, RankCommand, RankProcesses, rank_command
from tandem.process.hangup import on_hangup

_log = logging.getLogger(__name__)
_EXIT_S = 10.0
_AGAIN_S = 1.0


class NodeStarter:
    """Runs the ranks of one node, on the process's main thread."""

    def __init__(self, group: NodeGroup, node: int, *, source: str | None = None, module: str = RANK_MODULE) -> None:
        """`source`: address of this node for the other ranks; None: the one by which it reaches rank 0.
        `module`: module that runs a rank.

        Raises ConfigError for a node that the group does not have.
        """
        self._group = group
        self._ranks = group.ranks_of(node)
        self._source = source
        self._module = module
        self._turns: SimpleQueue[None] = SimpleQueue()
        """Wakes the main thread. A SimpleQueue, since signal handlers put into it and must not take a lock."""
        self._is_stopping = False
        self._is_impatient = False
        self._processes: RankProcesses | None = None

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or a refusal. Returns the exit code."""
        signals = _Signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signals.add_signal_handler(number, self._stop)
        on_hangup(signals, closed=self._stop, reread=self._reread)
        while not self._is_stopping:
            try:
                statuses = self._run_once()
            except OSError as error:  # out of processes, descriptors or memory, which is temporary
                _log.error("cannot start the ranks of this node: %s", error)
                statuses = {}
            if REFUSED in statuses.values():
                return REFUSED
            if not self._is_stopping:
                _log.info("the ranks of this node ended with their worker; starting them again")
                self._pause()
        return 0

    def _run_once(self) -> Mapping[int, int]:
        """Run the node's ranks once. Returns their exit statuses. Raises OSError when they cannot be started."""
        end = GroupEnd(exit_s=_EXIT_S, is_expected=True)
        end.watch(lambda _lost: self._turns.put(None))
        with ExitStack() as files:
            processes = self._processes = RankProcesses(self._commands(files), end)
        if self._is_stopping:  # a signal came while they were started
            self._ask_to_stop()
        while end.lost is None and not self._is_impatient:
            self._turns.get()
        self._processes = None
        processes.close()
        return dict(processes.statuses)

    def _pause(self) -> None:
        """Wait before the next try; ends early when stopping."""
        ends_s = time.monotonic() + _AGAIN_S
        while not self._is_stopping and (left_s := ends_s - time.monotonic()) > 0.0:
            with suppress(Empty):
                self._turns.get(timeout=left_s)

    def _commands(self, files: ExitStack) -> list[RankCommand]:
        commands = []
        for rank in self._ranks:
            # A file for each rank: reading it moves its position.
            fd = os.memfd_create("tandem-group")
            files.callback(os.close, fd)
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(self._group.to_json())
            os.lseek(fd, 0, os.SEEK_SET)
            argv = [*rank_command(self._module), "--join-fd", str(fd), "--rank", str(rank)]
            if self._source is not None:
                argv += ["--host", self._source]
            commands.append(RankCommand(rank=rank, argv=argv, fds=(fd,)))
        return commands

    def _stop(self) -> None:
        self._is_impatient = self._is_stopping
        self._is_stopping = True
        self._ask_to_stop()
        self._turns.put(None)

    def _reread(self) -> None:
        _log.info("SIGHUP changes nothing here: log settings come from rank 0")

    def _ask_to_stop(self) -> None:
        """Signal the ranks: those that are still connecting end, those that follow rank 0 ignore it."""
        if self._processes is not None:
            self._processes.send(signal.SIGTERM)


class _Signals:
    """Signal handlers of this process, in place of an event loop's."""

    def add_signal_handler(self, sig: int, callback: Callable[[], object]) -> None:
        """Call `callback` on the main thread at each signal, between two of its instructions."""
        signal.signal(sig, lambda _number, _frame: callback())
