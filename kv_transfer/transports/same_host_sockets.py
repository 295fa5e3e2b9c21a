"""Connections of transports within one host; an advert is a secret and the abstract address of a Unix socket."""

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
    """Listen on a Unix socket at an unguessable abstract address; returns the address and the socket."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = one_sided_wire.random_name()
    server.bind(address)
    server.listen(MAX_WRITERS)
    return address, server


def refuses_user(sock: socket.socket) -> str | None:
    """Reason to refuse a peer that runs as another user, according to the kernel; None if it may connect."""
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return None if uid == os.getuid() else f"the peer's uid is {uid}, not {os.getuid()}"


def dial_on_this_host(advert: bytes, name: str) -> socket.socket:
    """Connect to the Unix socket of an advert and send its secret. Raises TransferError that begins with `name`."""
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
