"""Sockets of killed processes are removed; those of live ones, and everything else, stay."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.process.runtime_folder import remove_dead_sockets


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bound(path: Path, *, age_s: float = 3600.0) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return made


def test_remove_dead_sockets_keeps_live_sockets_and_other_files(tmp_path: Path, sockets: ExitStack) -> None:
    for name in ("router-8000.sock", "8000.sock", "router-8000.sock.ab12"):
        bound(tmp_path / name).close()
    sockets.enter_context(bound(tmp_path / "router-8001.sock")).listen()
    full = sockets.enter_context(bound(tmp_path / "router-8002.sock"))
    full.listen(0)
    for _ in range(3):
        client = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        client.setblocking(False)
        client.connect_ex(str(tmp_path / "router-8002.sock"))
    # Bound, and about to be listened at.
    sockets.enter_context(bound(tmp_path / "router-8003.sock.cd34", age_s=0.0))
    (tmp_path / "notes.sock").write_text("mine")
    (tmp_path / "link.sock").symlink_to(tmp_path / "gone")
    remove_dead_sockets(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["link.sock", "notes.sock", "router-8001.sock", "router-8002.sock", "router-8003.sock.cd34"]


def test_remove_dead_sockets_without_a_folder_does_nothing(tmp_path: Path) -> None:
    remove_dead_sockets(tmp_path / "none")
