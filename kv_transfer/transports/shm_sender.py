"""`shm`, sending end: maps the receiver's pool and copies into it, once, without a socket in between."""

import os
import socket

from kv_transfer.messages import TransportOffer
from kv_transfer.pairing import Pairing
from kv_transfer.region import KVRegion
from kv_transfer.transports import claim_wire, shm_wire
from kv_transfer.transports.claim_wire import Kind
from kv_transfer.transports.claiming import CONNECT_S, ClaimingWriter
from kv_transfer.transports.copying import RegionCopier
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.host import host_id
from kv_transfer.transports.shared_pool import map_shared
from kv_transfer.transports.shm_receiver import NAME
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.ids import BlockId


class ShmWriter(ClaimingWriter):
    """PeerWriter of the `shm` transport."""

    def __init__(self, source: KVRegion, sock: socket.socket, target: KVRegion, pairing: Pairing) -> None:
        self._pairing = pairing
        self._pool_blocks = target.num_blocks
        self._copier = RegionCopier(source, target, pairing)
        super().__init__(sock, NAME)

    def _perform(self, job: WriteJob) -> None:
        token, slots = claim_wire.unpack_grant(job.order.grant)
        blocks = tuple(BlockId(slot) for slot in slots)
        target = self._pairing.at_destination(job.order.source.held_tokens, blocks, self._pool_blocks)
        self._claim(job, token)
        job.succeed(*self._copier.copy(job, target, lambda: self._may_move(job, token)))


class ShmSender:
    """KVSender of the `shm` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion) -> None:
        self._region = region

    def reaches(self, offer: TransportOffer) -> bool:
        """See KVSender."""
        return offer.name == NAME and offer.host_id == host_id()

    def connect(self, offer: TransportOffer, pairing: Pairing) -> ShmWriter:
        """See KVSender."""
        sock = greet_on_this_host(offer.advert)
        try:
            num_blocks, fd = shm_wire.receive_region(sock)
            try:
                buffer = map_shared(fd, num_blocks * pairing.destination.worker_block_bytes)
            finally:
                os.close(fd)
            target = KVRegion.of(buffer, pairing.destination)
            sock.settimeout(None)
            return ShmWriter(self._region, sock, target, pairing)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"shm: {error}") from None
        except TransferError:
            sock.close()
            raise


def greet_on_this_host(advert: bytes) -> socket.socket:
    """A connection to the Unix socket of an advert, its secret said. Raises TransferError."""
    secret, address = advert[:TOKEN_BYTES], advert[TOKEN_BYTES:].decode(errors="replace")
    if not address.startswith("\0tandem-kv-"):
        raise TransferError("not an advert of a KV transport of this host")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise TransferError(f"{NAME}: {error}") from None
    claim_wire.send(sock, Kind.HELLO, secret)
    return sock
