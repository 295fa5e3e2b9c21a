"""Connections that speak while their workers end."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.proofs.kills.nursery import Nursery

WAIT_S = 20.0


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with closing(Nursery(str(tmp_path / "n.sock"))) as made:
        yield made


def ended_child(status: int) -> int:
    """The id of a child that has ended and has not been waited for."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {status}"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("told", [b"15", b""])
def test_who_speaks_to_a_worker_that_has_just_ended_hears_how(nursery: Nursery, told: bytes) -> None:
    """Both are known in one round; `told` empty: whoever connected has gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery.look_after(theirs, ended_child(7))
    if told:
        ours.send(told)
    else:
        ours.shutdown(socket.SHUT_WR)
    assert select.select([theirs], [], [], WAIT_S)[0]
    nursery.look()
    ours.settimeout(WAIT_S)
    assert ours.recv(16) == b"7"
    ours.close()


def test_what_is_told_reaches_the_worker(nursery: Nursery) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = subprocess.Popen(["/bin/sleep", "1000"])
    nursery.look_after(theirs, worker.pid)
    ours.send(str(int(signal.SIGTERM)).encode())
    nursery.look()
    nursery.look()
    ours.settimeout(WAIT_S)
    assert ours.recv(16) == str(-signal.SIGTERM).encode()
    worker.wait()
    ours.close()
