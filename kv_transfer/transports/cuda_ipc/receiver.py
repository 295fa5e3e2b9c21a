"""`cuda_ipc`, receiving end: lends the pool in GPU memory to writers of the same user on the same host.

The checksum is torch_pool's `sum32`, computed on the device on both sides. As with shm, a loan cannot be taken back: a
frozen writer cannot be proven quiet. When a killed writer's socket ends, its last copy (a chunk at most) may still run
on the device, so the proof waits many times as long as a chunk takes.
"""

import socket
import struct

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.cuda_ipc.device_sharing import DeviceSharing
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import ClaimReceiver, Writer
from kv_transfer.transports.same_host import host_id
from kv_transfer.transports.same_host_sockets import listen_on_this_host, refuses_user
from tandem.errors import ConfigError

NAME = "cuda_ipc"
SETTLE_S = 0.25
"""Wait for a killed writer's last copies: three chunks of 64 MiB cross even PCIe 3 in 20 ms."""
_NUM_BLOCKS = struct.Struct("!Q")


class CudaIpcReceiver(ClaimReceiver):
    """KVReceiver of the `cuda_ipc` transport. Raises ConfigError for a pool that cannot be lent."""

    drain_proves_quiet = False
    """Copies to other ranks of this worker may still run when the sender has drained."""

    def __init__(self, region: KVRegion, sharing: DeviceSharing) -> None:
        if (obstacle := sharing.problem(region)) is not None or region.device is None:
            raise ConfigError(f"transfer.transport is {NAME!r}, which {obstacle}")
        self._pool = region.device
        self._sharing = sharing
        self._address, server = listen_on_this_host()
        super().__init__(server, NAME)

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, advert=self._secret + self._address.encode(), host_id=host_id())

    def _refuses(self, sock: socket.socket) -> str | None:
        return refuses_user(sock)

    def _welcome(self, writer: Writer) -> None:
        # One export per borrower: CUDA's allocator counts them.
        loan = self._sharing.lend(self._pool.memory)
        one_sided_wire.send_blob(writer.sock, _NUM_BLOCKS.pack(self._pool.num_blocks) + loan)

    def _part(self, writer: Writer) -> None:
        if writer.claims and not self._closing.is_set():
            self._closing.wait(SETTLE_S)


def unpack_loan(blob: bytes) -> tuple[int, bytes]:
    """Split a loan into the number of the pool's blocks and the token for DeviceSharing.borrow."""
    (num_blocks,) = _NUM_BLOCKS.unpack_from(blob.ljust(_NUM_BLOCKS.size, b"\0"))
    return num_blocks, blob[_NUM_BLOCKS.size :]
