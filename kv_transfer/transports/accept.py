"""Accepts connections at a receiving end until it closes, and starts a thread for each."""

import logging
import socket
import threading
from collections.abc import Iterator

from tandem.rpc.refusal_log import RefusalLog

ACCEPT_PAUSE_S = 0.1
"""Pause before accepting again when the process has run out of descriptors or memory."""


def accept_connections(
    server: socket.socket, closing: threading.Event, strangers: RefusalLog
) -> Iterator[socket.socket]:
    """Yield each connection to `server`; ends when the socket is shut down after `closing` was set."""
    while True:
        try:
            sock, _address = server.accept()
        except OSError as error:
            # Out of descriptors or memory: usually temporary, and a receiver that stopped listening would never
            # recover.
            if closing.wait(ACCEPT_PAUSE_S):
                return
            strangers.record("cannot accept connections at present", error, level=logging.WARNING)
            continue
        yield sock


def start_serving(thread: threading.Thread, strangers: RefusalLog) -> bool:
    """Start the thread that serves a connection; False when no thread can be started at present.

    The failure is usually temporary, and must not end the accepting thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        strangers.record("cannot start a thread for a connection at present", error, level=logging.WARNING)
        return False
    return True
