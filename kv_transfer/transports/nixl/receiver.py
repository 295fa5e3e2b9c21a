"""`nixl`, receiving end: writers reach the pool by RDMA or TCP, through UCX.

Each writer gets an agent of its own once it has sent the secret on its control connection, which also carries NIXL's
metadata. Quiet is proven by the writer's QUIET, sent after its last write was flushed, or by ending the writer's agent
here. A killed writer's bytes may still be in a socket, so the agent is ended before the claims are dropped; a frozen
writer is shut out the same way.
"""

import secrets
import socket
import struct

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.dial import advert_of, listen
from kv_transfer.transports.nixl.agent import NixlAgent
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import ClaimReceiver, Writer
from tandem.errors import TransferError
from tandem.rpc.hosts import is_loopback, keep_alive

NAME = "nixl"
SHUT_OUT_S = 2.0
"""Longest wait for a frozen writer's answer to a revocation."""
_POOL = struct.Struct("!QQ")


class NixlReceiver(ClaimReceiver):
    """KVReceiver of the `nixl` transport; see nixl.agent.problem. Raises OSError."""

    drain_proves_quiet = False

    def __init__(self, region: KVRegion, *, host: str = "127.0.0.1", shut_out_s: float = SHUT_OUT_S) -> None:
        self._region = region
        self._loopback = is_loopback(host)
        self.shut_out_s = shut_out_s
        super().__init__(listen(host), NAME)

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, advert=advert_of(self._server, self._secret), host_id="")

    def _refuses(self, sock: socket.socket) -> str | None:
        keep_alive(sock)
        return None

    def _welcome(self, writer: Writer) -> None:
        memory = self._region.buffer
        agent = NixlAgent(f"kv-{secrets.token_hex(8)}", memory, loopback=self._loopback)
        writer.resource = agent
        one_sided_wire.send_blob(writer.sock, _POOL.pack(agent.base, memory.nbytes) + agent.metadata())

    def _part(self, writer: Writer) -> None:
        if isinstance(writer.resource, NixlAgent):
            writer.resource.close()


def unpack_pool(blob: bytes) -> tuple[bytes, int, int]:
    """Split a receiver's description into (metadata, base address, size in bytes). Raises TransferError."""
    if len(blob) <= _POOL.size:
        raise TransferError("not a pool of the nixl transport")
    base, size_bytes = _POOL.unpack_from(blob)
    return blob[_POOL.size :], base, size_bytes
