"""`shm`, receiving end: passes the pool's memfd to writers of the same user.

The end of a writer's socket is the end of its process or, where it lives on, of its copying (see ShmWriter.close); a
mapping cannot be taken back, so a frozen writer stays unproven.
"""

import os
import socket
import struct

from kv_transfer.messages import TransportOffer
from kv_transfer.mover import load_mover
from kv_transfer.region import KVRegion
from kv_transfer.transports import claim_wire, shm_wire
from kv_transfer.transports.claims import MAX_WRITERS, ClaimReceiver, Writer
from kv_transfer.transports.host import host_id

NAME = "shm"
_CREDENTIALS = struct.Struct("iII")


class ShmReceiver(ClaimReceiver):
    """KVReceiver of the `shm` transport. Raises ValueError for a region that cannot be shared."""

    drain_proves_quiet = True

    def __init__(self, region: KVRegion) -> None:
        if region.fd is None:
            raise ValueError("the KV region is not shared memory")
        load_mover()  # now rather than with the first chunk
        self._fd = region.fd
        self._num_blocks = region.num_blocks
        self._address, server = listen_on_this_host()
        super().__init__(server, NAME)

    def offer(self) -> TransportOffer:
        """See KVReceiver."""
        return TransportOffer(name=NAME, advert=self._secret + self._address.encode(), host_id=host_id())

    def _refuses(self, sock: socket.socket) -> str | None:
        return refuses_user(sock)

    def _welcome(self, writer: Writer) -> None:
        shm_wire.send_region(writer.sock, self._num_blocks, self._fd)

    def _part(self, _writer: Writer) -> None:
        """Nothing is under way between a copy and the memory."""


def listen_on_this_host() -> tuple[str, socket.socket]:
    """A Unix socket under an unguessable abstract address."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = claim_wire.random_name()
    server.bind(address)
    server.listen(MAX_WRITERS)
    return address, server


def refuses_user(sock: socket.socket) -> str | None:
    """Why whoever connected is none of ours, by the kernel's word; see unix(7), SO_PEERCRED."""
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return None if uid == os.getuid() else f"it is of uid {uid}"
