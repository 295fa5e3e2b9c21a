"""One port for peers with TLS and without, while a cluster changes from one to the other (`mode: permissive`).

gRPC takes one kind per port. So this listener looks at the first byte of each connection and passes it on to one of two
Unix sockets, at the cost of a copy in this process.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem.rpc.refusal_log import RefusalLog

MAX_RELAYS = 1024
"""Maximum number of open connections. Each takes three descriptors of this process, and anybody may open one."""
_HANDSHAKE = 0x16
"""First byte of a TLS connection; HTTP/2 begins with a letter."""
_FIRST_BYTE_S = 5.0
_COPY_BYTES = 256 << 10
_MAX_PATH_BYTES = 107
"""Maximum length of the path of a Unix socket on Linux."""


class MixedPort:
    """Listens while entered; `plain_path` and `tls_path` name the sockets of the servers behind it."""

    def __init__(self, host: str, port: int) -> None:
        """`port`: 0 takes a free one."""
        self._host = host
        self.port = port
        self._folder = Path()
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._refusals = RefusalLog("permissive port")

    @property
    def plain_path(self) -> Path:
        return self._folder / "plain"

    @property
    def tls_path(self) -> Path:
        return self._folder / "tls"

    async def __aenter__(self) -> Self:
        """Bind. Raises OSError when the address is taken, or TMPDIR too long for a socket in it."""
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-port-"))
        try:
            if len(os.fsencode(self.plain_path)) > _MAX_PATH_BYTES:
                raise OSError(
                    f"{self.plain_path} is longer than the {_MAX_PATH_BYTES} bytes that the path of a socket may have:"
                    " set TMPDIR to a shorter one"
                )
            self._server = await asyncio.start_server(self._accept, self._host, self.port, reuse_port=False)
        except OSError:
            self._remove()
            raise
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None  # noqa: S101  # narrows: this runs in a task
        if len(self._relays) >= MAX_RELAYS:
            self._refusals.record("a connection was refused", f"{MAX_RELAYS} are open", level=logging.WARNING)
            writer.transport.abort()
            return
        self._relays.add(relay)
        try:
            # Cancelled when the port closes, which asyncio would log as an error of this handler.
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._relays.discard(relay)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_FIRST_BYTE_S):
            first = await reader.read(_COPY_BYTES)
        if not first:
            return
        behind = self.tls_path if first[0] == _HANDSHAKE else self.plain_path
        from_server, to_server = await asyncio.open_unix_connection(behind)
        try:
            to_server.write(first)
            copies = [
                asyncio.create_task(_copy(reader, to_server)),
                asyncio.create_task(_copy(from_server, writer)),
            ]
            try:
                # HTTP/2 knows no half-closed connections: the end of one side is the end.
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        finally:
            to_server.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_COPY_BYTES):
        target.write(data)
        await target.drain()
