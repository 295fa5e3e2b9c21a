"""Connections that send while their workers end."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.proofs.kills.fork_server import ForkServer

WAIT_S = 20.0


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    with closing(ForkServer(str(tmp_path / "n.sock"))) as made:
        yield made


def ended_child(status: int) -> int:
    """The id of a child that has ended and has not been waited for."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {status}"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("message", [b"15", b""])
def test_fork_server_connection_to_ended_worker_gets_its_status(fork_server: ForkServer, message: bytes) -> None:
    """Both events come in one round; an empty `message` means that the client has gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_server.look_after(theirs, ended_child(7))
    if message:
        ours.send(message)
    else:
        ours.shutdown(socket.SHUT_WR)
    assert select.select([theirs], [], [], WAIT_S)[0]
    fork_server.look()
    ours.settimeout(WAIT_S)
    assert ours.recv(16) == b"7"
    ours.close()


def test_fork_server_forwards_signals(fork_server: ForkServer) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = subprocess.Popen(["/bin/sleep", "1000"])
    fork_server.look_after(theirs, worker.pid)
    ours.send(str(int(signal.SIGTERM)).encode())
    fork_server.look()
    fork_server.look()
    ours.settimeout(WAIT_S)
    assert ours.recv(16) == str(-signal.SIGTERM).encode()
    worker.wait()
    ours.close()
