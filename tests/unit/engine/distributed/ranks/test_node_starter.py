"""A node's starter: signals, and a machine without room for another process."""

import errno
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from engine.distributed.links.lost import RankLost
from engine.distributed.ranks import node_starter
from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.ranks.node_starter import NodeStarter
from engine.distributed.ranks.processes import RankCommand
from tests.support.node_processes import group

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals that would end this process without the starter's handlers."""
    reached: list[int] = []
    before = {number: signal.signal(number, lambda got, _frame: reached.append(got)) for number in SIGNALS}
    monkeypatch.setattr("tandem.process.hangup.has_terminal", lambda: False)
    monkeypatch.setattr(node_starter, "_AGAIN_S", 0.0)
    yield reached
    for number, handler in before.items():
        signal.signal(number, handler)


class Played:
    """Ranks that try to connect until they are signalled. `lives`: signals that the starter gets in each life."""

    lives: Sequence[Sequence[signal.Signals] | OSError] = ()
    begun: list[list[int]]
    signals: list[signal.Signals]

    def __init__(self, commands: Sequence[RankCommand], end: GroupEnd) -> None:
        self._end = end
        self._ending: threading.Thread | None = None
        self.statuses: Mapping[int, int] = {command.rank: 0 for command in commands}
        assert all(os.fstat(command.fds[0]).st_size for command in commands)
        self.begun.append([command.fds[0] for command in commands])
        life = self.lives[len(self.begun) - 1]
        if isinstance(life, OSError):
            raise life
        for number in life:
            os.kill(os.getpid(), number)

    def send(self, signum: signal.Signals) -> None:
        self.signals.append(signum)
        self._ending = threading.Thread(target=self._end.report, args=(RankLost("rank 2 has ended"),))
        self._ending.start()

    def close(self) -> None:
        self._end.close()
        if self._ending is not None:
            self._ending.join()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[Played]:
    Played.begun, Played.signals = [], []
    monkeypatch.setattr(node_starter, "RankProcesses", Played)
    return Played


def run() -> int:
    return NodeStarter(group(size=4, num_nodes=2), 1).run()


def test_node_starter_retries_ranks_after_failed_fork(played: type[Played]) -> None:
    none_left = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    played.lives = [none_left, [signal.SIGTERM]]
    assert run() == 0
    assert played.signals == [signal.SIGTERM]
    for fds in played.begun:
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_node_starter_sighup_ends_no_rank(played: type[Played], handlers: list[int]) -> None:
    played.lives = [[signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]]
    assert run() == 0
    assert handlers == []
    assert played.signals == [signal.SIGTERM]


def test_node_starter_closed_terminal_ends_ranks(played: type[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.process.hangup.has_terminal", lambda: True)
    played.lives = [[signal.SIGHUP]]
    assert run() == 0
    assert played.signals == [signal.SIGTERM]
