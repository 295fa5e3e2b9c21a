"""`shm`, receiving end: passes the pool's memfd to writers of the same user.

A writer's socket ends with its process, or after its last copy (see ShmWriter.close). A mapping cannot be taken back,
so a frozen writer cannot be proven quiet.
"""

import socket

from kv_transfer.memory.mover import load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.one_sided.receiver import ClaimReceiver, Writer
from kv_transfer.transports.same_host import host_id
from kv_transfer.transports.same_host_sockets import listen_on_this_host, refuses_user
from kv_transfer.transports.shm import wire as shm_wire

NAME = "shm"


class ShmReceiver(ClaimReceiver):
    """KVReceiver of the `shm` transport. Raises ValueError for a region that cannot be shared."""

    drain_proves_quiet = True

    def __init__(self, region: KVRegion) -> None:
        if region.fd is None:
            raise ValueError("the KV region is not shared memory")
        load_mover()  # here, so that the first chunk is not delayed
        self._fd = region.fd
        self._num_blocks = region.num_blocks
        self._address, server = listen_on_this_host()
        super().__init__(server, NAME)

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, advert=self._secret + self._address.encode(), host_id=host_id())

    def _refuses(self, sock: socket.socket) -> str | None:
        return refuses_user(sock)

    def _welcome(self, writer: Writer) -> None:
        shm_wire.send_region(writer.sock, self._num_blocks, self._fd)

    def _part(self, _writer: Writer) -> None:
        """Nothing to do: a finished copy is in the memory."""
