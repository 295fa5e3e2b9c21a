"""Taking in connections for as long as a receiving end lives, each for a thread of its own."""

import logging
import socket
import threading
from collections.abc import Iterator

ACCEPT_PAUSE_S = 0.1
"""Between two tries to accept when the process has no room for one more connection."""

log = logging.getLogger(__name__)


def accepted(server: socket.socket, closing: threading.Event, name: str) -> Iterator[socket.socket]:
    """Each connection to `server`, until it is hung up on after `closing` was set. `name`: of the transport."""
    while True:
        try:
            sock, _address = server.accept()
        except OSError as error:
            # Out of descriptors or memory: that passes, and a receiver that stopped listening would not come back.
            if closing.wait(ACCEPT_PAUSE_S):
                return
            log.warning("no %s peer can be accepted now: %s", name, error)
            continue
        yield sock


def begins(thread: threading.Thread, name: str) -> bool:
    """Start the thread that serves a connection; False when the process can have no more threads now.

    That passes, too, and must not end the thread that accepts.
    """
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("no %s peer can be served now: %s", name, error)
        return False
    return True
