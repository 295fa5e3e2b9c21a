"""Connections of transports that cross machines; an advert holds the receiver's address and secret.

The advert comes over the authenticated link between the workers, so a peer with the secret belongs to the cluster.
"""

import json
import socket

from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.wire import ClaimKind
from tandem.errors import TransferError
from tandem.rpc.hosts import is_loopback, keep_alive

CONNECT_S = 5.0
BACKLOG = 256


def listen(host: str) -> socket.socket:
    """Listen on a free port of `host`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def advert_of(server: socket.socket, secret: bytes) -> bytes:
    host, port = server.getsockname()[:2]
    return json.dumps({"host": host, "port": port, "secret": secret.hex()}).encode()


def is_loopback_advert(advert: bytes) -> bool:
    """Whether the advert's address is on this machine; False for a malformed advert."""
    try:
        return is_loopback(_parse(advert)[0])
    except TransferError:
        return False


def dial(advert: bytes) -> socket.socket:
    """Connect and send the secret; the socket's timeout stays CONNECT_S. Raises TransferError."""
    host, port, secret = _parse(advert)
    try:
        sock = socket.create_connection((host, port), CONNECT_S)
        try:
            keep_alive(sock)
            sock.sendall(one_sided_wire.pack(ClaimKind.HELLO, secret))
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise TransferError(f"{host}:{port}: {error}") from None
    return sock


def _parse(advert: bytes) -> tuple[str, int, bytes]:
    try:
        data = json.loads(advert)
        host, port, secret = str(data["host"]), int(data["port"]), bytes.fromhex(data["secret"])
    except (ValueError, KeyError, TypeError):
        raise TransferError("not the advert of a connection") from None
    if len(secret) != TOKEN_BYTES:
        raise TransferError("not the advert of a connection")
    return host, port, secret
