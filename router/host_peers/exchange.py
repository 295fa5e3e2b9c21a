"""Router processes that share one host's doors (`router.processes`): each can tell what all of them know.

Which process answers a scrape, or shows the status, is the kernel's choice, so whoever does asks the others, over
sockets in a folder that only their user can enter. One that does not answer in time is left out: it is starting, or
gone.
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
    """One process's place among them, for one thing that they tell; an async context manager."""

    def __init__(self, folder: Path, *, index: int, render: Callable[[], bytes], name: str = "router") -> None:
        """`render` gives what this process knows itself; `name` tells apart what is told."""
        self._folder = folder
        self._path = folder / f"{name}-{index}.sock"
        self._pattern = f"{name}-*.sock"
        self._render = render
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Raises OSError when the folder is not to be written to."""
        self._path.unlink(missing_ok=True)  # of an earlier life
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
        """What those tell that answer, this process left out."""
        paths = [path for path in sorted(self._folder.glob(self._pattern)) if path != self._path]
        return [told for told in await asyncio.gather(*map(self._ask, paths)) if told]

    async def figures(self) -> bytes:
        """Metrics of all that answer, where that is what they tell."""
        told = await self.others()
        if not told:
            return self._render()
        try:
            return await asyncio.to_thread(merge, [self._render(), *told])
        except ValueError:
            _log.exception("figures of another router process cannot be read")
            return self._render()

    async def _ask(self, path: Path) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_BYTES)
                try:
                    return await _all_of(reader)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._render())
            await writer.drain()
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes | None:
    """To the end; None when there is no end within the bound."""
    text = bytearray()
    while part := await reader.read(1 << 16):
        text += part
        if len(text) > MAX_BYTES:
            return None
    return bytes(text)
