"""The control socket of a running cluster, over which it is scaled, flipped and restarted.

It is a Unix socket of mode 0600 in a folder of mode 0700, named after the HTTP server's port.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.control.operations import abort, carry_out
from cluster.control.wire import (
    AbortRequest,
    ControlReply,
    MalformedRequest,
    ProcessStatus,
    StatusRequest,
    encode_message,
    parse_request,
)
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ChangeFailed
from cluster.supervisor.rollout import ChangeRefused
from tandem.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.process.runtime_folder import has_listener, place_for_socket, remove_dead_sockets, runtime_folder

MAX_LINE_BYTES = 1 << 16
_log = logging.getLogger(__name__)
_BACKLOG_LINES = 1024


def control_path(config: ClusterConfig) -> Path:
    """Return the socket's path for a cluster with this configuration."""
    return default_path(config.router.port) if config.control_socket is None else Path(config.control_socket)


def check_place(config: ClusterConfig) -> None:
    """Check a configured socket path before minutes are spent on loading. Raises ConfigError."""
    if config.control_socket is not None:
        _look_at(Path(config.control_socket))


def _look_at(path: Path) -> None:
    place_for_socket(path, "control_socket")
    if has_listener(path):
        raise ConfigError(f"control_socket: another cluster answers at {path}")


def default_path(port: int) -> Path:
    """Return the socket's path for the cluster with this HTTP port."""
    return runtime_folder() / f"{port}.sock"


class ControlSocket:
    def __init__(self, cluster: LocalCluster, *, report: Callable[[str], None]) -> None:
        """`report` is called with the progress of every change, including those requested here."""
        self.path = control_path(cluster.config)
        self._cluster = cluster
        self._report = report
        self._server: asyncio.Server | None = None
        self._inode: int | None = None
        self._changes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Open the socket; without a safe path the cluster serves without one. Raises ConfigError for a configured
        path.
        """
        try:
            await self._open()
        except ConfigError as error:
            if self._cluster.config.control_socket is not None:
                raise
            self._report(f"this cluster cannot be changed while it runs: {error}")
        return self

    async def _open(self) -> None:
        _look_at(self.path)
        if self._cluster.config.control_socket is None:
            await asyncio.to_thread(remove_dead_sockets, self.path.parent)
        try:
            self.path.unlink(missing_ok=True)  # left over from an earlier process
            self._server = await asyncio.start_unix_server(self._answer, self.path, limit=MAX_LINE_BYTES)
            self.path.chmod(0o600)
            self._inode = self.path.stat().st_ino
        except OSError as error:
            raise ConfigError(f"control_socket: {self.path}: {error.strerror or error}") from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == self._inode:  # another process may have replaced it
                    self.path.unlink()
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            lines: asyncio.Queue[ControlReply] = asyncio.Queue(_BACKLOG_LINES)
            try:
                request = await reader.readline()
            except ValueError:
                writer.write(
                    encode_message(ControlReply(done=False, reason=f"a line has at most {MAX_LINE_BYTES} bytes"))
                )
                return
            if not request:
                return  # another process has only looked whether this one is alive
            work = asyncio.get_running_loop().create_task(self._serve(request, lines))
            self._changes.add(work)  # the change continues if its client disconnects
            work.add_done_callback(self._changes.discard)
            reply = ControlReply()
            while reply.done is None:
                reply = await lines.get()
                writer.write(encode_message(reply))
                await writer.drain()
        except OSError:
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _serve(self, line: bytes, lines: "asyncio.Queue[ControlReply]") -> None:
        def report(text: str) -> None:
            self._report(text)
            with contextlib.suppress(asyncio.QueueFull):  # the client does not read; keep room for the last line
                if lines.qsize() < _BACKLOG_LINES - 1:
                    lines.put_nowait(ControlReply(progress=text))

        try:
            request = parse_request(line)
            if isinstance(request, StatusRequest):
                lines.put_nowait(self._status())
            elif isinstance(request, AbortRequest):
                await abort(self._cluster)
            else:
                await carry_out(self._cluster, request, report)
        except (MalformedRequest, ChangeRefused, ChangeFailed) as error:
            self._report(f"not done: {error}")
            lines.put_nowait(ControlReply(done=False, reason=str(error)))
        except Exception as error:  # noqa: BLE001  # a client must not wait for a last line that never comes
            _log.exception("a change failed unexpectedly")
            lines.put_nowait(ControlReply(done=False, reason=f"internal error: {type(error).__name__}"))
        else:
            lines.put_nowait(ControlReply(done=True))

    def _status(self) -> ControlReply:
        processes = tuple(
            ProcessStatus(
                name=view.name, role=view.role.value, state=view.state.value, pid=view.pid, address=view.address
            )
            for view in self._cluster.processes
        )
        return ControlReply(processes=processes, changing=self._cluster.under_way is not None)
