"""`nixl`, receiving end: writers reach the pool by RDMA or TCP, through UCX.

Each writer gets an agent of its own once it has sent the secret on its control connection, which also carries NIXL's
metadata. Quiet is proven by the writer's QUIET, sent after its last write was flushed, or by ending the writer's agent
here. A killed writer's bytes may still be in a socket, so the agent is ended before the claims are dropped; a frozen
writer is shut out the same way.

A pool on a device is offered in a form that writers which know host memory only cannot read, so that they take
another transport: they would address it as host memory, and send a CRC-32 where the device computes `sum32`.
"""

import secrets
import socket
import struct

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.dial import advert_of, listen
from kv_transfer.transports.nixl.agent import AgentMemory, NixlAgent
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import ClaimReceiver, Writer
from tandem.errors import TransferError
from tandem.rpc.hosts import is_loopback, keep_alive

NAME = "nixl"
SHUT_OUT_S = 2.0
"""Longest wait for a frozen writer's answer to a revocation."""
_POOL = struct.Struct("!QQ")
"""Base address and size of a pool in host memory."""
_DEVICE_POOL = struct.Struct("!QQi")
"""Base address, size, and CUDA index, -1 for a device that is the host."""
_ON_DEVICE = b"device "
"""Begins the advert of a pool on a device."""


class NixlReceiver(ClaimReceiver):
    """KVReceiver of the `nixl` transport; see nixl.agent.problem. Raises OSError."""

    drain_proves_quiet = False

    def __init__(self, region: KVRegion, *, host: str = "127.0.0.1", shut_out_s: float = SHUT_OUT_S) -> None:
        self._region = region
        self._loopback = is_loopback(host)
        self.shut_out_s = shut_out_s
        super().__init__(listen(host), NAME)

    def offer(self) -> TransportOffer:
        form = b"" if self._region.device is None else _ON_DEVICE
        return TransportOffer(name=NAME, advert=form + advert_of(self._server, self._secret), host_id="")

    def _refuses(self, sock: socket.socket) -> str | None:
        keep_alive(sock)
        return None

    def _welcome(self, writer: Writer) -> None:
        memory = AgentMemory.of_region(self._region)
        agent = NixlAgent(f"kv-{secrets.token_hex(8)}", memory, loopback=self._loopback)
        writer.resource = agent
        on_device = self._region.device is not None
        one_sided_wire.send_blob(writer.sock, pack_pool(memory, on_device=on_device) + agent.metadata())

    def _part(self, writer: Writer) -> None:
        if isinstance(writer.resource, NixlAgent):
            writer.resource.close()


def is_on_device(offer: TransportOffer) -> bool:
    """Whether the offered pool is on a device."""
    return offer.advert.startswith(_ON_DEVICE)


def address_of(offer: TransportOffer) -> bytes:
    """The advert of the receiver's control connection."""
    return offer.advert.removeprefix(_ON_DEVICE)


def pack_pool(memory: AgentMemory, *, on_device: bool) -> bytes:
    """Describe a receiver's pool, in front of its agent's metadata."""
    if not on_device:
        return _POOL.pack(memory.base, memory.size_bytes)
    return _DEVICE_POOL.pack(memory.base, memory.size_bytes, -1 if memory.gpu is None else memory.gpu)


def unpack_pool(blob: bytes, *, on_device: bool) -> tuple[bytes, AgentMemory]:
    """Split a receiver's description into its agent's metadata and the memory. Raises TransferError."""
    form = _DEVICE_POOL if on_device else _POOL
    if len(blob) <= form.size:
        raise TransferError("not a pool of the nixl transport")
    base, size_bytes, *gpu = form.unpack_from(blob)
    memory = AgentMemory(base=base, size_bytes=size_bytes, gpu=gpu[0] if gpu and gpu[0] >= 0 else None)
    return blob[form.size :], memory
