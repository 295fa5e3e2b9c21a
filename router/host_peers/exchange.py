"""Shares metrics, usage and status among all router processes of one host (`router.processes`).

The kernel chooses the process that answers a scrape, or a request for the status, so that process collects from the
others, over sockets in a folder that only their user can enter. One that does not answer in time is left out: it is
starting, or gone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from router.metrics.merge import merge

ANSWER_S = 0.5
MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class HostPeerExchange:
    """Serves this process's data on one subject, and collects the others'; an async context manager."""

    def __init__(self, folder: Path, *, index: int, render: Callable[[], bytes], name: str = "router") -> None:
        """`render`: returns this process's data; `name`: of the subject."""
        self._folder = folder
        self._path = folder / f"{name}-{index}.sock"
        self._pattern = f"{name}-*.sock"
        self._render = render
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Start serving. Raises OSError when the folder is not writable."""
        self._path.unlink(missing_ok=True)  # left by an earlier process
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        self._path.chmod(0o600)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def others(self) -> list[bytes]:
        """Return the answers of the other processes that answer."""
        paths = [path for path in sorted(self._folder.glob(self._pattern)) if path != self._path]
        return [answer for answer in await asyncio.gather(*map(self._fetch, paths)) if answer]

    async def figures(self) -> bytes:
        """Return the merged metrics of all processes that answer, where metrics are the subject."""
        others = await self.others()
        if not others:
            return self._render()
        try:
            return await asyncio.to_thread(merge, [self._render(), *others])
        except ValueError:
            _log.exception("cannot parse the metrics of another router process")
            return self._render()

    async def _fetch(self, path: Path) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_BYTES)
                try:
                    return await _read_all(reader)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if not writer.is_closing():  # who asked may have given up; uvloop's transports raise then
                writer.write(self._render())
                await writer.drain()
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes | None:
    """Read to the end; None if that exceeds the bound."""
    text = bytearray()
    while part := await reader.read(1 << 16):
        text += part
        if len(text) > MAX_BYTES:
            return None
    return bytes(text)
