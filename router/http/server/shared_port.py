"""One of several processes that share a port leaves it to the others, so that no client is refused for it.

Until a process closes its socket the kernel gives it its share of what is new; what is in the socket's queue by then is
reset. So the queue is emptied in the same breath. Who is connected already is served, and asked to come back over
another connection, which one of the others will have; an idle connection is closed after a while. A client whose
handshake falls between the last look into the queue and the close, some microseconds, is reset all the same.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn

from router.http.server.connection import Connection
from router.http.server.tls_listener import TlsListener

_CLOSE = (b"connection", b"close")


async def leave_port(
    server: uvicorn.Server, listening: socket.socket, secured: TlsListener | None, *, is_inherited: bool = False
) -> None:
    """Stop listening at once; connections that are there stay, each for one answer more. `secured`: of one in TLS.

    `is_inherited`: another process listens with the same socket, which has all that is in the queue.
    """
    arrived = [] if is_inherited else _arrived(listening)
    if not is_inherited:
        # At once: uvloop closes what it was given only when its loop turns next.
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RD)
    for one in server.servers:
        one.close()
    listening.close()
    # The second is made of the first, once a second.
    server.config.encoded_headers = [*server.config.encoded_headers, _CLOSE]
    server.server_state.default_headers = [*server.server_state.default_headers, _CLOSE]
    loop, protocol = asyncio.get_running_loop(), new_protocol(server)
    for accepted in arrived:
        if secured is not None:
            secured.serve(accepted)
            continue
        # Its client may have left already.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(protocol, accepted)


def end_behind_answers(server: uvicorn.Server) -> None:
    """Connections that are there end with the answer under way, though its head may not have said so."""
    for connection in server.server_state.connections:
        if isinstance(connection, Connection):
            connection.end_behind_answer()


def new_protocol(server: uvicorn.Server) -> Callable[[], asyncio.Protocol]:
    """What makes the protocol of one more connection."""
    return partial(
        cast("Any", server.config.http_protocol_class),
        config=server.config,
        server_state=server.server_state,
        app_state=server.lifespan.state,
    )


def _arrived(listening: socket.socket) -> list[socket.socket]:
    """Connections that the kernel has accepted and the event loop has not seen yet."""
    arrived = []
    listening.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listening.accept()
            connection.setblocking(False)
            arrived.append(connection)
    return arrived
