"""Plain connections beside gRPC (`ClusterChannels.connect`): every failure is one that its caller expects."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.rpc.cluster_grpc import ClusterChannels
from tests.unit.tandem.rpc.test_framed_connection import LOOPS, run

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class _Gone(asyncio.Protocol):
    """Loses its connection before whoever asked for it is told that it is open."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


@LOOPS
def test_connect_to_peer_that_is_gone_at_once_raises_oserror(make_loop: MakeLoop) -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def meet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            closed.set()

        async with await asyncio.start_server(meet, "127.0.0.1", 0) as server:
            with pytest.raises(OSError):  # noqa: PT011  # each loop has its own text
                await ClusterChannels(None).connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", _Gone)
            await closed.wait()

    run(make_loop, main())


async def test_connect_to_what_is_no_address_raises_configerror() -> None:
    channels = ClusterChannels(None, allows_plaintext=True)
    with pytest.raises(ConfigError, match="not host:port"):
        await channels.connect("dns:///worker:1:2", asyncio.Protocol)
