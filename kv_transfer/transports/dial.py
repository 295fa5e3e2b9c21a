"""Connections of transports that cross machines: an advert says where a receiver listens, and with which secret.

The advert comes over the authenticated link between the workers, so whoever knows the secret belongs to the cluster.
"""

import json
import socket
from ipaddress import ip_address

from kv_transfer.transports import claim_wire
from kv_transfer.transports.claim_wire import Kind
from kv_transfer.transports.grants import TOKEN_BYTES
from tandem.errors import TransferError

CONNECT_S = 5.0
BACKLOG = 256
DEAD_PEER_MS = 10_000
"""A connection whose peer's machine does not acknowledge for so long has ended."""


def listen(host: str) -> socket.socket:
    """A free port of `host`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def advert_of(server: socket.socket, secret: bytes) -> bytes:
    """Where `server` listens."""
    host, port = server.getsockname()[:2]
    return json.dumps({"host": host, "port": port, "secret": secret.hex()}).encode()


def stays_here(advert: bytes) -> bool:
    """Whether what goes there never leaves this machine; False for what is no advert."""
    try:
        return is_loopback(_parse(advert)[0])
    except TransferError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is of this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def dial(advert: bytes) -> socket.socket:
    """A connection on which the secret was said; its time limit is still CONNECT_S. Raises TransferError."""
    host, port, secret = _parse(advert)
    try:
        sock = socket.create_connection((host, port), CONNECT_S)
        try:
            keep_alive(sock)
            sock.sendall(claim_wire.pack(Kind.HELLO, secret))
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise TransferError(f"{host}:{port}: {error}") from None
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Small messages at once, and an end when the peer's machine is gone. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)


def _parse(advert: bytes) -> tuple[str, int, bytes]:
    try:
        data = json.loads(advert)
        host, port, secret = str(data["host"]), int(data["port"]), bytes.fromhex(data["secret"])
    except (ValueError, KeyError, TypeError):
        raise TransferError("not the advert of a connection") from None
    if len(secret) != TOKEN_BYTES:
        raise TransferError("not the advert of a connection")
    return host, port, secret
