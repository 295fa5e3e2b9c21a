"""The limit of tcp: one blocking connection over loopback, `sendmsg` of many ranges against `recv_into` of each."""

import socket
import time
from collections.abc import Mapping
from typing import Any

_HOST = "127.0.0.1"
_IOV_MAX = 1024
_GO, _DONE = b"g", b"d"


class Sender:
    """Waits until the receiver is ready, then sends; the receiver's last message stops the clock."""

    def __init__(self, _options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._view = pools["source"].view
        self._views: dict[str, list[memoryview]] = {}
        self.about: dict[str, Any] = {}

    def connect(self, address: Any) -> None:
        self._sock = socket.create_connection((_HOST, address))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        self._views[case["name"]] = [self._view[here : here + length] for here, _, length in case["copies"]]

    def run(self, name: str) -> float:
        _expect(self._sock, _GO)
        started_s = time.perf_counter()
        views = self._views[name]
        for i in range(0, len(views), _IOV_MAX):
            batch = views[i : i + _IOV_MAX]
            while batch:
                batch = _rest(batch, self._sock.sendmsg(batch))
        _expect(self._sock, _DONE)
        return time.perf_counter() - started_s


class Receiver:
    """Reads directly into the places where the bytes belong."""

    def __init__(self, _options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._view = pools["target"].view
        self._views: dict[str, list[memoryview]] = {}
        self._server = socket.create_server((_HOST, 0))
        self.about: dict[str, Any] = {}

    def open(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def connect(self, address: Any) -> None:
        self._sock, _ = self._server.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        self._views[case["name"]] = [self._view[there : there + length] for _, there, length in case["copies"]]

    def run(self, name: str) -> None:
        self._sock.sendall(_GO)
        for view in self._views[name]:
            received = 0
            while received < len(view):
                count = self._sock.recv_into(view[received:])
                if not count:
                    raise ConnectionError("the sender has disconnected")
                received += count
        self._sock.sendall(_DONE)


def _rest(views: list[memoryview], sent: int) -> list[memoryview]:
    """Return what `sent` bytes leave of `views`."""
    for i, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[i + 1 :]]
        sent -= len(view)
    return []


def _expect(sock: socket.socket, word: bytes) -> None:
    if sock.recv(1) != word:
        raise ConnectionError("the other end has disconnected")
