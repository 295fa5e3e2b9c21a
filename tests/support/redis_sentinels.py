"""A master, a replica and three sentinels that watch them: real Redis processes on free loopback ports."""

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from tests.support.redis_server import RedisServer, binary, free_port

MASTER_NAME = "the-master"
_WAIT_S = 60.0


class RedisSentinel:
    """One sentinel process; a context manager."""

    def __init__(
        self, master: RedisServer, *, user: str | None, password: str | None, server_password: str | None
    ) -> None:
        """`user`: the only one who may log in; None: the default user."""
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-sentinel-")
        self._user, self._password = user, password
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._folder.name}",
            f"sentinel monitor {MASTER_NAME} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {MASTER_NAME} 500",
            f"sentinel failover-timeout {MASTER_NAME} 4000",
        ]
        if server_password is not None:
            lines.append(f"sentinel auth-pass {MASTER_NAME} {server_password}")
        if password is not None:
            lines.append(f"sentinel sentinel-pass {password}")
            if user is None:
                lines.append(f"requirepass {password}")
            else:
                lines += [f"sentinel sentinel-user {user}", f"user {user} on >{password} &* +@all", "user default off"]
        self._file = Path(self._folder.name) / "sentinel.conf"
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        command = [binary(), str(self._file), "--sentinel"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """At once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def view(self) -> dict[bytes, bytes]:
        """What it thinks of the master; empty while it does not answer."""
        try:
            with Redis(port=self.port, username=self._user, password=self._password, socket_timeout=5.0) as client:
                return dict(client.execute_command("SENTINEL", "MASTER", MASTER_NAME))
        except RedisError:
            return {}

    @property
    def is_settled(self) -> bool:
        """Whether it can fail over: it knows the other sentinels and the replica."""
        view = self.view()
        return (view.get(b"num-other-sentinels"), view.get(b"num-slaves")) == (b"2", b"1")


class SentinelGroup:
    """All five; a context manager, entered once a failover is possible."""

    def __init__(
        self, *, password: str | None = None, sentinel_user: str | None = None, sentinel_password: str | None = None
    ) -> None:
        self._stack = ExitStack()
        self.first = RedisServer(password=password)
        self.second = RedisServer(password=password, replica_of=self.first)
        self.sentinels = [
            RedisSentinel(self.first, user=sentinel_user, password=sentinel_password, server_password=password)
            for _ in range(3)
        ]

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(self.first)
            self._stack.enter_context(self.second)
            wait_until(self._replicates, "the replica follows")
            for sentinel in self.sentinels:
                self._stack.enter_context(sentinel)
            wait_until(lambda: all(one.is_settled for one in self.sentinels), "the sentinels know each other")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _replicates(self) -> bool:
        replica = self.first.do("INFO", "replication").get("slave0", {})
        return bool(replica.get("state") == "online")

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]

    def role(self, server: RedisServer) -> bytes:
        """`master` or `slave`, as the server itself says."""
        return bytes(server.do("ROLE")[0])


def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Ask until it is so, without an event loop."""
    end_s = time.monotonic() + _WAIT_S
    while not reached():
        assert time.monotonic() < end_s, f"never: {what}"
        signal.sigtimedwait([], 0.02)
