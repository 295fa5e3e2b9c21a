"""Connections of transports within one host: an advert is a secret and the abstract address of a Unix socket."""

import os
import socket
import struct

from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import MAX_WRITERS
from kv_transfer.transports.one_sided.wire import ClaimKind
from tandem.errors import TransferError

CONNECT_S = 5.0
_CREDENTIALS = struct.Struct("iII")


def listen_on_this_host() -> tuple[str, socket.socket]:
    """A Unix socket under an unguessable abstract address."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = one_sided_wire.random_name()
    server.bind(address)
    server.listen(MAX_WRITERS)
    return address, server


def refuses_user(sock: socket.socket) -> str | None:
    """Why the peer's user is not ours, according to the kernel; None if it is. See unix(7), SO_PEERCRED."""
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return None if uid == os.getuid() else f"it is of uid {uid}"


def greet_on_this_host(advert: bytes, name: str) -> socket.socket:
    """A connection to the Unix socket of an advert of the transport `name`, its secret said. Raises TransferError."""
    secret, address = advert[:TOKEN_BYTES], advert[TOKEN_BYTES:].decode(errors="replace")
    if not address.startswith("\0tandem-kv-"):
        raise TransferError("not an advert of a KV transport of this host")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise TransferError(f"{name}: {error}") from None
    one_sided_wire.send(sock, ClaimKind.HELLO, secret)
    return sock
