"""A proxy between a receiver and its senders: two sockets and two threads for each connection."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from kv_transfer.transports.accept import accept_connections
from tests.proofs.faults.network.line import Line, Surroundings
from tests.proofs.faults.network.meters import meters_of
from tests.proofs.faults.plan import Place

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: what is closed is reset, and what lies in its buffers is lost."""


class Relay:
    """Owns `server`; `reach` connects to the receiver."""

    def __init__(self, server: socket.socket, reach: Callable[[], socket.socket], around: Surroundings) -> None:
        self._server, self._reach, self._around = server, reach, around
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._accept, name="faults-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection that is left, and every thread."""
        self._around.closing.set()
        _shut(self._server, socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
            connection.join()

    def _accept(self) -> None:
        for sender in accept_connections(self._server, self._around.closing, "relayed"):
            try:
                receiver = self._reach()
            except OSError:
                sender.close()
                continue
            connection = _Connection(sender, receiver, self._around, self._ended)
            with self._lock:
                self._connections.add(connection)
            connection.start()

    def _ended(self, connection: "_Connection") -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    def __init__(
        self,
        sender: socket.socket,
        receiver: socket.socket,
        around: Surroundings,
        ended: Callable[["_Connection"], None],
    ) -> None:
        self._sender, self._receiver, self._ended = sender, receiver, ended
        self._on_one_host = sender.family == socket.AF_UNIX
        self._lock = threading.Lock()
        self._running = 2
        for sock in (sender, receiver):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there, back = meters_of(around.transport, around.injector)
        greeting = around.injector.greeting()
        self._to_receiver = Line(sender, receiver, there, Place.TO_RECEIVER, around, self.cut, greeting)
        self._to_sender = Line(receiver, sender, back, Place.TO_SENDER, around, self.cut, greeting)
        self._threads = [
            threading.Thread(target=self._carry, args=(line,), name="faults-line", daemon=True)
            for line in (self._to_receiver, self._to_sender)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Until both lines have ended."""
        for thread in self._threads:
            thread.join()

    def cut(self, hard: bool) -> None:
        """End it on any thread; `hard`: what is under way is lost and both ends are reset."""
        if self._on_one_host:
            # The receiver must see no end of the writer's but its own: the writer is told, and its end is passed on.
            self._to_receiver.deaf = self._to_sender.deaf = True
            _shut(self._sender, socket.SHUT_WR)
            return
        self._to_receiver.deaf = self._to_sender.deaf = True
        for sock in (self._sender, self._receiver):
            if hard:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Who reads here wakes up; with a reset the ends hear of it only when the sockets are closed.
            _shut(sock, socket.SHUT_RD if hard else socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """End both sides at once."""
        for sock in (self._sender, self._receiver):
            _shut(sock, socket.SHUT_RDWR)

    def _carry(self, line: Line) -> None:
        line.run()
        # Half a connection may go on; an end that takes nothing more is noticed by the thread that still reads from it.
        if line is self._to_receiver:
            _shut(self._receiver, socket.SHUT_WR)
        else:
            _shut(self._sender, socket.SHUT_WR)
        with self._lock:
            self._running -= 1
            if self._running:
                if line is self._to_sender and not self._on_one_host:
                    _shut(self._sender, socket.SHUT_RD)
                return
        self._sender.close()
        self._receiver.close()
        self._ended(self)


def _shut(sock: socket.socket, how: int) -> None:
    with suppress(OSError):
        sock.shutdown(how)
