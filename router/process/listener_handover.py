"""Hands the ports of a single router process over to the one that is started to replace it.

The successor finds a Unix socket named after the HTTP port and receives the listening socket itself over it, so that
the kernel's queue survives either process. gRPC cannot be given a socket, so both listen at its port for a moment. The
successor opens its servers when it has joined every worker that the predecessor reaches. It confirms once it serves,
and the predecessor drains and ends. A successor that dies first has changed nothing. Each query has a connection of its
own: a predecessor of an older version closes it, and must still receive the confirmation. Of two successors started at
once, the one that took the path last stays; the other notices, and drains as well.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from router.fleet.readiness import wait_for_first_worker
from router.types.worker_view import WorkerKey
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError
from tandem.process.lifetime import Lifetime
from tandem.process.runtime_folder import (
    has_listener,
    is_trusted_peer,
    place_for_socket,
    remove_dead_sockets,
    runtime_folder,
    untrusted_socket_reason,
)

_SERVES = b"serves\n"
_REACHED = b"reached\n"
"""Requests the addresses of the workers that answer the predecessor."""
_ANSWER_S = 5.0
_JOIN_S = 60.0
"""Seconds for a successor to join all of them; then it takes over with those it has."""
_LOOK_S = 1.0
"""Period of checks of the predecessor's workers, and of which router owns the path."""
_AGAIN_S = 1.0
"""Pause before accepting successors again when the process was out of file descriptors."""
_MAX_BYTES = 4096
_MAX_ANSWER_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def handover_path(config: RouterConfig) -> Path | None:
    """The Unix socket where a router with this configuration meets its successor; None where a port is not fixed."""
    if config.handover_socket is not None:
        return Path(config.handover_socket)
    return runtime_folder() / f"router-{config.port}.sock" if config.port and config.grpc_port else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddresses:
    """Addresses that a router listens on."""

    host: str
    port: int
    grpc_port: int

    @classmethod
    def from_config(cls, config: RouterConfig) -> "ListenAddresses":
        return cls(host=config.host, port=config.port, grpc_port=config.grpc_port)

    def as_json(self) -> bytes:
        return json.dumps([self.host, self.port, self.grpc_port]).encode()


class RunningRouter:
    """A client of the router that has the ports until this process serves; to be closed."""

    def __init__(self, path: Path, link: socket.socket, http: socket.socket) -> None:
        self._path = path
        self._link = link
        self.http = http
        """The listening socket of the HTTP server."""

    @classmethod
    def connect(cls, config: RouterConfig) -> "RunningRouter | None":
        """Connect to the running router; None when none answers. Blocks.

        Raises ConfigError when it listens at other addresses, or may belong to another user, who would then hold the
        socket that requests and their keys arrive at.
        """
        path = handover_path(config)
        if path is None or not path.exists():
            return None
        if why := untrusted_socket_reason(path):
            raise ConfigError(f"router.handover_socket: {why}")
        try:
            link, addresses_json, http = _meet(path)
        except OSError:
            return None
        if addresses_json != ListenAddresses.from_config(config).as_json():
            http.close()
            link.close()
            if config.handover_socket is None:  # the name contains only the port, and this router has another address
                return None
            raise ConfigError(f"router: the router at {path} listens on other addresses: {addresses_json.decode()}")
        _log.info("the running router will hand over its ports")
        return cls(path, link, http)

    def reached(self) -> frozenset[str] | None:
        """Return the addresses of the workers that answer it; empty if it has ended, or its version is too old for the
        query. None: no answer at the moment. Blocks.
        """
        answer = b""
        try:
            link, _, http = _meet(self._path)
            with link, http:
                link.sendall(_REACHED)
                while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER_BYTES:
                    if not (data := link.recv(_MAX_BYTES)):
                        return frozenset()
                    answer += data
            return frozenset(map(str, json.loads(answer)))
        except (ConnectionError, FileNotFoundError):
            return frozenset()
        except (ConfigError, OSError, ValueError, TypeError):
            return None

    def confirm_serving(self) -> None:
        """Confirm that this process serves, so that the other one drains."""
        try:
            self._link.sendall(_SERVES)
        except OSError as error:
            _log.warning("cannot confirm to the previous router that this one serves (it may have ended): %s", error)

    def close(self) -> None:
        """Close the connection; the listening socket stays open."""
        self._link.close()


def _meet(path: Path) -> tuple[socket.socket, bytes, socket.socket]:
    """Connect to the router at `path`; return the link, its addresses as JSON and its listening socket. Blocks.

    Raises ConfigError when another user answers, OSError when none does, ConnectionError when it has ended.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(_ANSWER_S)
        link.connect(str(path))
        if not is_trusted_peer(link):
            raise ConfigError(f"router.handover_socket: another user answers at {path}")
        addresses_json, descriptors, _, _ = socket.recv_fds(link, _MAX_BYTES, 1)
        if not addresses_json or not descriptors:
            raise ConnectionResetError(f"the router at {path} has closed the connection")
    except (ConfigError, OSError):
        link.close()
        raise
    return link, addresses_json, socket.socket(fileno=descriptors[0])


class ListenerHandover:
    """Offers the ports, while entered, to a router started with the same configuration."""

    def __init__(
        self,
        config: RouterConfig,
        http: Callable[[], socket.socket],
        *,
        reached: Callable[[], frozenset[str]],
        on_handed_over: Callable[[], None],
        succeeds: bool = False,
    ) -> None:
        """`http`: the listening socket. `reached`: the workers that answer. `on_handed_over` is called when a successor
        serves. `succeeds`: the router at the path now has handed its ports to this one.
        """
        self._path = handover_path(config)
        self._is_stated = config.handover_socket is not None
        self._addresses = ListenAddresses.from_config(config)
        self._http = http
        self._reached = reached
        self._on_handed_over = on_handed_over
        self._succeeds = succeeds
        self.is_handed_over = False
        """Whether a successor serves."""
        self._listening: socket.socket | None = None
        self._inode: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start offering the ports; without a safe path for the socket, log a warning and continue without."""
        if self._path is None:
            return self
        try:
            place_for_socket(self._path, "router.handover_socket")
            if not self._is_stated:
                await asyncio.to_thread(remove_dead_sockets, self._path.parent)
            if not self._succeeds and has_listener(self._path):
                raise ConfigError(f"router.handover_socket: another router answers at {self._path}")
            self._listening = self._listen(self._path)
        except (ConfigError, OSError) as error:
            _log.warning("a successor cannot find this router: %s", error)
            return self
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listening))
        self._looking = asyncio.get_running_loop().create_task(self._watch_socket(self._path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop offering the ports. Idempotent."""
        tasks = [*self._tasks, *(task for task in (self._accepting, self._looking) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is None or self._path is None:
            return
        self._listening.close()
        self._listening = None
        with contextlib.suppress(OSError):
            if self._is_there(self._path):  # the successor's socket may be there by now
                self._path.unlink()

    def _listen(self, path: Path) -> socket.socket:
        """Listen at `path`, atomically replacing a predecessor's socket."""
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(2)}")  # another successor may do the same at once
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
            try:
                link, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors: closing connections free some
                _log.warning("cannot answer a successor: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            task = loop.create_task(self._offer(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _offer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.setblocking(False)
            socket.send_fds(link, [self._addresses.as_json()], [self._http().fileno()])
            loop = asyncio.get_running_loop()
            while (question := await loop.sock_recv(link, len(_REACHED))) == _REACHED:
                await loop.sock_sendall(link, json.dumps(sorted(self._reached())).encode() + b"\n")
            if question == _SERVES:
                self._leave()

    def _leave(self) -> None:
        _log.info("a successor is serving")
        self.is_handed_over = True
        self._on_handed_over()

    async def _watch_socket(self, path: Path) -> None:
        """Wait until another router owns the path: a rival successor has no link to this router."""
        while not await asyncio.to_thread(self._is_taken, path):  # noqa: ASYNC110 - no event reports another process
            await asyncio.sleep(_LOOK_S)
        self._leave()

    def _is_taken(self, path: Path) -> bool:
        """Whether another router with the same addresses answers there. Blocks."""
        try:
            if self._is_there(path):
                return False
            link, addresses_json, http = _meet(path)
        except (ConfigError, OSError):
            return False
        with link, http:
            return addresses_json == self._addresses.as_json()

    def _is_there(self, path: Path) -> bool:
        """Whether this router's socket is still at the path."""
        return path.stat().st_ino == self._inode


async def wait_for_workers(
    registry: WorkerRegistry,
    addresses: Callable[[], Mapping[WorkerKey, str]],
    lifetime: Lifetime,
    predecessor: RunningRouter | None,
) -> bool:
    """Wait for a session with a decode worker and, for a bounded time, with every worker that the predecessor reaches;
    return False when stopped before. `addresses`: returns the address of every worker whose session is open.
    """
    if not await wait_for_first_worker(registry, lifetime):
        return False
    if predecessor is None:
        return True
    loop = asyncio.get_running_loop()
    changed, until = asyncio.Event(), loop.time() + _JOIN_S
    registry.watch(changed.set)
    stop = asyncio.ensure_future(lifetime.wait())
    try:
        while True:
            changed.clear()
            reached = await asyncio.to_thread(predecessor.reached)
            missing = None if reached is None else reached - set(addresses().values())
            if missing == frozenset() or loop.time() >= until:
                break
            waiter = asyncio.ensure_future(changed.wait())
            await asyncio.wait({waiter, stop}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if stop.done():
                return False
    finally:
        stop.cancel()
        registry.unwatch(changed.set)
    if missing is None:
        _log.warning("taking over without knowing the previous router's workers: it does not answer")
    elif missing:
        _log.warning("taking over without sessions to %s, which the previous router has", ", ".join(sorted(missing)))
    return True
