"""`memory`: both workers live in one process, as in tests and single-process clusters. One copy, no system calls."""

import secrets

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.mover import Mover, load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.write_stop_lock import WriteStopLock
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.grants import GrantTable, WriteGrant
from kv_transfer.transports.interface import QuietListener
from kv_transfer.transports.region_copy import RegionCopier
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError

NAME = "memory"


class MemoryFabric:
    """The receivers of one process by their adverts; shared by all ends that should reach each other."""

    def __init__(self) -> None:
        self.host_id = secrets.token_hex(16)
        self.receivers: dict[bytes, MemoryReceiver] = {}


class MemoryReceiver:
    """KVReceiver of the `memory` transport."""

    name = NAME
    drain_proves_quiet = True

    def __init__(self, region: KVRegion, fabric: MemoryFabric) -> None:
        self.region = region
        self.grants = GrantTable()
        self._fabric = fabric
        self._advert = secrets.token_bytes(16)
        fabric.receivers[self._advert] = self
        load_mover()  # here, so that the first chunk is not delayed

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, advert=self._advert, host_id=self._fabric.host_id)

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        return self.grants.open(key, landing).token

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        return self.grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """End a grant. Always proven at once: bursts land under the grant's lock."""
        self.grants.revoke(key)
        return True

    def listen_quiet(self, listener: QuietListener) -> None:
        """Nothing to report: every revocation is proven at once."""

    def close(self) -> None:
        self._fabric.receivers.pop(self._advert, None)
        self.grants.revoke_all()


class MemoryWriter(QueuedWriter):
    """PeerWriter of the `memory` transport."""

    def __init__(self, source: KVRegion, receiver: MemoryReceiver, pairing: Pairing, mover: Mover | None) -> None:
        self._receiver = receiver
        self._copier = RegionCopier(source, receiver.region, pairing, mover)
        super().__init__("kv-memory-write")

    def _perform(self, job: WriteJob) -> None:
        grant = self._receiver.grants.find(job.order.grant)
        if grant is None or grant.key != job.order.key:
            raise TransferError("unknown grant")
        gate = WriteStopLock(lambda: _check(job, grant), self._queue.lock, grant.lock)
        job.succeed(*self._copier.copy(job.order, grant.landing.cells, gate, lambda: self._queue.reading(job)))


def _check(job: WriteJob, grant: WriteGrant) -> None:
    job.check()
    if grant.revoked:
        raise TransferError("grant revoked")


class MemorySender:
    """KVSender of the `memory` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion, fabric: MemoryFabric) -> None:
        self._region = region
        self._fabric = fabric
        self._mover = load_mover()

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == NAME and offer.host_id == self._fabric.host_id

    def connect(self, offer: TransportOffer, pairing: Pairing) -> MemoryWriter:
        receiver = self._fabric.receivers.get(offer.advert)
        if receiver is None:
            raise TransferError("no such receiver in this process")
        return MemoryWriter(self._region, receiver, pairing, self._mover)
