"""What router processes on one host tell each other of their tenants' use, where no Redis does.

See `router.tenants.shared_rate_limits`.

Each listens in the folder that only their user can enter, and hears each of the others over a connection that lasts:
when it ends, that process has ended, and what it had under way with it.
"""

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError

from router.tenants.shared_rate_limits import SharedRateLimits
from tandem.cluster_state.entries import LOAD_BYTES, BadEntry, tallies_from_pb, tallies_to_pb
from tandem.v1 import board_pb2 as pb
from tandem.values.ids import Incarnation

TURN_S = 0.15
"""Between two tellings of what has changed."""
LOOK_S = 0.5
"""Between two looks for processes that are new."""
_SIZE_BYTES = 4
_MOST_UNREAD = 4 * LOAD_BYTES
_log = logging.getLogger(__name__)


class RateLimitExchange:
    """One process's place among them; an async context manager."""

    def __init__(self, folder: Path, *, index: int, router: Incarnation, limits: SharedRateLimits) -> None:
        self._folder = folder
        self._path = folder / f"limits-{index}.sock"
        self._router = router
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._listeners: set[asyncio.StreamWriter] = set()
        self._frame = b""
        self._sequence = 0
        self._heard: dict[Path, asyncio.Task[None]] = {}
        self._routers: dict[Path, Incarnation] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Raises OSError when the folder is not to be written to."""
        self._path.unlink(missing_ok=True)  # of an earlier life
        self._server = await asyncio.start_unix_server(self._welcome, self._path)
        self._path.chmod(0o600)
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._find_siblings())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = [*self._tasks, *self._heard.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._listeners:
            writer.close()
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    @property
    def num_heard(self) -> int:
        """Other processes that this one hears."""
        return len(self._routers)

    async def _publish(self) -> None:
        published = None
        while True:
            tallies = self._limits.tallies()
            if tallies != published:
                published = tallies
                self._sequence += 1
                load = pb.BoardLoad(router=self._router, sequence=self._sequence, tallies=tallies_to_pb(tallies))
                body = load.SerializeToString()
                self._frame = len(body).to_bytes(_SIZE_BYTES, "little") + body
                for writer in tuple(self._listeners):
                    self._give(writer)
            await asyncio.sleep(TURN_S)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        try:
            if self._frame:
                self._give(writer)
            await reader.read()  # nothing is asked: this is its end
        except OSError:
            pass
        finally:
            self._listeners.discard(writer)
            writer.close()

    def _give(self, writer: asyncio.StreamWriter) -> None:
        if writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            writer.transport.abort()
        else:
            writer.write(self._frame)

    async def _find_siblings(self) -> None:
        while True:
            for path in self._folder.glob("limits-*.sock"):
                if path != self._path and path not in self._heard:
                    task = self._heard[path] = asyncio.create_task(self._hear(path))
                    task.add_done_callback(partial(self._ended, path))
            await asyncio.sleep(LOOK_S)

    async def _hear(self, path: Path) -> None:
        """Until it ends, or says what cannot be."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return  # left behind by a process that was killed
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    self._apply(path, await _next_frame(reader))
        except (BadEntry, DecodeError) as error:
            _log.error("%s does not make sense: %s", path.name, error)
        finally:
            writer.close()
            self._routers.pop(path, None)
            self._limits.keep(frozenset(self._routers.values()))

    def _ended(self, path: Path, _task: asyncio.Task[None]) -> None:
        self._heard.pop(path, None)

    def _apply(self, path: Path, frame: bytes) -> None:
        load = pb.BoardLoad.FromString(frame)
        self._routers[path] = router = Incarnation(load.router)
        self._limits.apply_remote(router, tallies_from_pb(load.tallies))


async def _next_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "little")
    if size > LOAD_BYTES:
        raise BadEntry(f"{size} bytes")
    return await reader.readexactly(size)
