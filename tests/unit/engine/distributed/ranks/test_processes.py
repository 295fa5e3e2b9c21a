"""One death ends the group and is reported with the rank; no process is left behind."""

import os
import queue
import signal
import subprocess
import sys

import pytest

from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.ranks.processes import RankCommand, RankProcesses

WAIT_S = 20.0


@pytest.fixture
def pipe():
    """The read end sees the end of file once every child is gone."""
    read, write = os.pipe()
    ends = [read, write]
    yield ends
    for fd in ends:
        os.close(fd)


def start(pipe, *codes: str) -> tuple[RankProcesses, GroupEnd]:
    """One child per program; this process keeps no write end of the pipe."""
    commands = [
        RankCommand(rank=rank, argv=[sys.executable, "-S", "-c", code], fds=(pipe[1],))
        for rank, code in enumerate(codes, 1)
    ]
    end = GroupEnd(exit_s=WAIT_S)
    made = RankProcesses(commands, end)
    os.close(pipe.pop())
    return made, end


SLEEP = "import time; time.sleep(1000)"


def test_rank_processes_one_death_ends_all_and_is_reported_once(pipe) -> None:
    processes, end = start(pipe, SLEEP, SLEEP, SLEEP)
    reported = queue.SimpleQueue()
    end.watch(reported.put)
    os.kill(processes.pids[2], signal.SIGKILL)
    lost = reported.get(timeout=WAIT_S)
    assert str(lost) == f"rank 2 (pid {processes.pids[2]}) was ended by SIGKILL"
    assert os.read(pipe[0], 1) == b"", "a child is left"
    again = queue.SimpleQueue()
    end.watch(again.put)
    assert again.get(timeout=WAIT_S) is lost, "a late listener is called at once"
    processes.close()
    assert reported.empty()


def test_rank_processes_any_exit_code_is_a_death(pipe) -> None:
    processes, end = start(pipe, SLEEP, "raise SystemExit(0)")
    reported = queue.SimpleQueue()
    end.watch(reported.put)
    assert "rank 2" in str(reported.get(timeout=WAIT_S))
    processes.close()


def test_rank_processes_close_kills_without_reporting_losses(pipe) -> None:
    processes, end = start(pipe, SLEEP, "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP)
    reported = queue.SimpleQueue()
    end.watch(reported.put)
    processes.close()
    processes.close()
    assert os.read(pipe[0], 1) == b""
    assert reported.empty()


def test_rank_processes_failed_start_ends_others(pipe) -> None:
    commands = [
        RankCommand(rank=1, argv=[sys.executable, "-S", "-c", SLEEP], fds=(pipe[1],)),
        RankCommand(rank=2, argv=["/nonexistent/python"], fds=(pipe[1],)),
    ]
    with pytest.raises(FileNotFoundError):
        RankProcesses(commands, GroupEnd(exit_s=WAIT_S))
    os.close(pipe.pop())
    assert os.read(pipe[0], 1) == b""


def test_rank_processes_lingering_process_is_killed() -> None:
    code = (
        "import sys, threading; from engine.distributed.ranks.processes import RankCommand, RankProcesses\n"
        "from engine.distributed.ranks.group_end import GroupEnd\n"
        "command = RankCommand(rank=1, argv=[sys.executable, '-S', '-c', 'raise SystemExit(3)'], fds=(2,))\n"
        "RankProcesses([command], GroupEnd(exit_s=0.05)); threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert "exited with code 3: this worker cannot go on without it" in done.stderr
    assert "has not ended in time" in done.stderr
