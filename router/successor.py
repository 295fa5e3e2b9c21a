"""A router that stands alone hands its doors to the one that is started in its place.

The successor finds a Unix socket named after the HTTP port and gets the listening socket itself over it: the kernel's
queue goes on, whoever closes which end. gRPC lets nobody hand it a socket, so both listen at its port for a moment.
Once the successor serves it says so, and the predecessor drains and ends. One that dies first has changed nothing.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.config import RouterConfig
from tandem.errors import ConfigError
from tandem.runtime_folder import answers_as_us, others_could_have_made, place_for_socket, runtime_folder

_SERVES = b"serves\n"
_ANSWER_S = 5.0
_MAX_BYTES = 4096
_log = logging.getLogger(__name__)


def handover_path(config: RouterConfig) -> Path | None:
    """Where a router with this configuration meets its successor; None of one whose port nobody knows beforehand."""
    if config.handover_socket is not None:
        return Path(config.handover_socket)
    return runtime_folder() / f"router-{config.port}.sock" if config.port and config.grpc_port else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where a router listens."""

    host: str
    port: int
    grpc_port: int

    @classmethod
    def of(cls, config: RouterConfig) -> "Doors":
        """As configured."""
        return cls(host=config.host, port=config.port, grpc_port=config.grpc_port)

    def as_json(self) -> bytes:
        """For the socket."""
        return json.dumps([self.host, self.port, self.grpc_port]).encode()


class Predecessor:
    """Who has the doors until this process serves; close it in the end."""

    def __init__(self, link: socket.socket, http: socket.socket) -> None:
        self._link = link
        self.http = http
        """The listening socket of the HTTP door."""

    @classmethod
    def find(cls, config: RouterConfig) -> "Predecessor | None":
        """None when nobody answers. Blocks.

        Raises ConfigError when the one who does has other doors, or may be somebody else's: requests and their keys
        would come in at a socket that he holds, too.
        """
        path = handover_path(config)
        if path is None or not path.exists():
            return None
        if why := others_could_have_made(path):
            raise ConfigError(f"router.handover_socket: {why}")
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(_ANSWER_S)
        descriptors: list[int] = []
        try:
            link.connect(str(path))
            if not answers_as_us(link):
                link.close()
                raise ConfigError(f"router.handover_socket: another user answers at {path}")
            told, descriptors, _, _ = socket.recv_fds(link, _MAX_BYTES, 1)
        except OSError:
            told = b""
        if not told or len(descriptors) != 1:
            link.close()
            return None
        http = socket.socket(fileno=descriptors[0])
        if told != Doors.of(config).as_json():
            http.close()
            link.close()
            raise ConfigError(f"router: the router that answers at {path} has other doors: {told.decode()}")
        _log.info("the router that runs will hand its doors over")
        return cls(link, http)

    def relieve(self) -> None:
        """This process serves: the other one may go."""
        with contextlib.suppress(OSError):  # it has gone already
            self._link.sendall(_SERVES)

    def close(self) -> None:
        """The listening socket stays with whoever has taken it."""
        self._link.close()


class HandsOver:
    """While entered, whoever is started with the same configuration gets the doors."""

    def __init__(
        self, config: RouterConfig, http: Callable[[], socket.socket], *, relieved: Callable[[], None]
    ) -> None:
        """`http`: the listening socket. `relieved` is called when a successor serves."""
        self._path = handover_path(config)
        self._doors = Doors.of(config)
        self._http = http
        self._relieved = relieved
        self.is_relieved = False
        """A successor serves."""
        self._listening: socket.socket | None = None
        self._inode: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Where there is no safe place the router serves all the same, and says so."""
        if self._path is None:
            return self
        try:
            place_for_socket(self._path, "router.handover_socket")
            self._listening = self._listen(self._path)
        except (ConfigError, OSError) as error:
            _log.warning("a successor will not find this router: %s", error)
            return self
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listening))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Offer the doors no more: this router leaves them to nobody, or has left them. Once is enough."""
        tasks = [*self._tasks] + ([self._accepting] if self._accepting is not None else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is None or self._path is None:
            return
        self._listening.close()
        self._listening = None
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # the successor's own may be there by now
                self._path.unlink()

    def _listen(self, path: Path) -> socket.socket:
        """In the place of a predecessor's, at once."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            listening.bind(str(fresh))
            fresh.chmod(0o600)
            listening.listen()
            self._inode = fresh.stat().st_ino
            fresh.replace(path)
        except OSError:
            listening.close()
            raise
        return listening

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link, _ = await loop.sock_accept(listening)
            task = loop.create_task(self._offer(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _offer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.setblocking(False)
            socket.send_fds(link, [self._doors.as_json()], [self._http().fileno()])
            if await asyncio.get_running_loop().sock_recv(link, len(_SERVES)) == _SERVES:
                _log.info("a successor serves")
                self.is_relieved = True
                self._relieved()
