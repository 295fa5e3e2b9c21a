"""Taking in connections for as long as a receiving end lives, each for a thread of its own."""

import logging
import socket
import threading
from collections.abc import Iterator

from tandem.rpc.refusal_log import RefusalLog

ACCEPT_PAUSE_S = 0.1
"""Between two tries to accept when the process has no room for one more connection."""


def accept_connections(
    server: socket.socket, closing: threading.Event, strangers: RefusalLog
) -> Iterator[socket.socket]:
    """Each connection to `server`, until it is hung up on after `closing` was set."""
    while True:
        try:
            sock, _address = server.accept()
        except OSError as error:
            # Out of descriptors or memory: that passes, and a receiver that stopped listening would not come back.
            if closing.wait(ACCEPT_PAUSE_S):
                return
            strangers.record("no peer can be accepted now", error, level=logging.WARNING)
            continue
        yield sock


def start_serving(thread: threading.Thread, strangers: RefusalLog) -> bool:
    """Start the thread that serves a connection; False when the process can have no more threads now.

    That passes, too, and must not end the thread that accepts.
    """
    try:
        thread.start()
    except RuntimeError as error:
        strangers.record("no peer can be served now", error, level=logging.WARNING)
        return False
    return True
