"""Hands a shared port over to the other processes, so that no client's connection is refused.

Until a process closes its socket the kernel assigns it its share of new connections; those still in the socket's queue
at the close are reset. So the queue is emptied immediately before. Clients that are already connected are served, and
told to reconnect, which leads them to one of the other processes; an idle connection is closed after a while. A client
whose handshake falls into the microseconds between emptying the queue and the close is reset all the same.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn

from router.http.server.connection import CLOSE_HEADER, Connection
from router.http.server.tls_listener import TlsListener


async def leave_port(
    server: uvicorn.Server, listening: socket.socket, secured: TlsListener | None, *, is_inherited: bool = False
) -> None:
    """Stop listening at once; open connections get one more answer each. `secured`: the TLS listener, if any.

    `is_inherited`: another process listens with the same socket, and inherits its queue.
    """
    arrived = [] if is_inherited else _arrived(listening)
    if not is_inherited:
        # At once: uvloop closes what it was given only when its loop turns next.
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RD)
    for one in server.servers:
        one.close()
    listening.close()
    # uvicorn makes the second from the first, once a second.
    server.config.encoded_headers = [*server.config.encoded_headers, CLOSE_HEADER]
    server.server_state.default_headers = [*server.server_state.default_headers, CLOSE_HEADER]
    loop, protocol = asyncio.get_running_loop(), new_protocol(server)
    for accepted in arrived:
        if secured is not None:
            secured.serve(accepted)
            continue
        # Its client may have left already.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(protocol, accepted)


def end_behind_answers(server: uvicorn.Server) -> None:
    """End open connections after the answer in progress, although its head may not have announced that."""
    for connection in server.server_state.connections:
        if isinstance(connection, Connection):
            connection.end_behind_answer()


def new_protocol(server: uvicorn.Server) -> Callable[[], asyncio.Protocol]:
    """Return the factory of the server's protocols."""
    return partial(
        cast("Any", server.config.http_protocol_class),
        config=server.config,
        server_state=server.server_state,
        app_state=server.lifespan.state,
    )


def _arrived(listening: socket.socket) -> list[socket.socket]:
    """Accept the connections that the kernel has queued and the event loop has not seen yet."""
    arrived = []
    listening.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listening.accept()
            connection.setblocking(False)
            arrived.append(connection)
    return arrived
