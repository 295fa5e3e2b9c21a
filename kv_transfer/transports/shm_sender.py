"""`shm`, sending end: maps the receiver's pool and copies into it, once, without a socket in between."""

import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from kv_transfer.gate import Gate
from kv_transfer.messages import TransferKey, TransportOffer
from kv_transfer.mover import Mover, load_mover
from kv_transfer.pairing import Pairing
from kv_transfer.placed import PlacedCells
from kv_transfer.region import KVRegion
from kv_transfer.transports import shm_wire
from kv_transfer.transports.copying import RegionCopier
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.host import host_id
from kv_transfer.transports.shared_pool import map_shared
from kv_transfer.transports.shm_receiver import NAME
from kv_transfer.transports.shm_wire import Kind
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError
from tandem.ids import BlockId

CONNECT_S = 5.0
CLAIM_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Claim:
    key: TransferKey
    target: PlacedCells
    granted: "Future[bool]" = field(default_factory=Future)

    def settle(self, granted: bool) -> None:
        with suppress(InvalidStateError):
            self.granted.set_result(granted)


class ShmWriter(QueuedWriter):
    """PeerWriter of the `shm` transport."""

    def __init__(
        self, source: KVRegion, sock: socket.socket, target: KVRegion, pairing: Pairing, mover: Mover | None
    ) -> None:
        self._sock = sock
        self._pairing = pairing
        self._pool_blocks = target.num_blocks
        self._copier = RegionCopier(source, target, pairing, mover)
        self._claims: dict[bytes, _Claim] = {}
        self._tokens: dict[TransferKey, bytes] = {}
        super().__init__("kv-shm-write")
        self._reader = threading.Thread(target=self._read, name="kv-shm-read", daemon=True)
        self._reader.start()

    def cancel(self, key: TransferKey) -> bool:
        """Stop; the receiver learns by QUIET that this attempt is over here."""
        super().cancel(key)
        with self._queue.lock:
            token = self._tokens.get(key)
            said = token is None or self._give_up(token)
        if not said:
            self._break("the receiver does not read")
        return True

    def close(self) -> None:
        """Stop copying first: the end of the socket tells the receiver that nothing is copied any more."""
        self._break("connection closed")
        super().close()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()

    def _perform(self, job: WriteJob) -> None:
        token, slots = shm_wire.unpack_grant(job.order.grant)
        claim = self._claim(job, token, slots)
        gate = Gate(lambda: self._check(job, token), self._queue.lock)
        job.succeed(*self._copier.copy(job.order, claim.target, gate))

    def _claim(self, job: WriteJob, token: bytes, slots: Sequence[int]) -> _Claim:
        """Ask once per grant; the receiver refuses what it has revoked."""
        with self._queue.lock:
            job.check()
            claim = self._claims.get(token)
            if claim is None:
                blocks = tuple(BlockId(slot) for slot in slots)
                target = self._pairing.at_destination(job.order.source.held_tokens, blocks, self._pool_blocks)
                claim = self._claims[token] = _Claim(key=job.order.key, target=target)
                self._tokens[job.order.key] = token
                if not shm_wire.send(self._sock, Kind.CLAIM, token):
                    claim.settle(False)
        try:
            granted = claim.granted.result(CLAIM_S)
        except TimeoutError:
            raise TransferError("the receiver does not answer") from None
        if not granted:
            raise TransferError("unknown grant")
        return claim

    def _check(self, job: WriteJob, token: bytes) -> None:
        """Under the queue's lock: raises TransferError when the job must stop or its grant has ended."""
        job.check()
        if token not in self._claims:
            raise TransferError("grant revoked")

    def _read(self) -> None:
        try:
            while (message := shm_wire.receive(self._sock)) is not None:
                self._on_message(*message)
            reason = "the receiver has gone"
        except (OSError, TransferError) as error:
            reason = f"shm connection lost: {error}"
        self._break(reason)
        # Every copy is stopped: now, and not before, the receiver may see the end.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _on_message(self, kind: Kind, token: bytes) -> None:
        said = True
        with self._queue.lock:
            claim = self._claims.get(token)
            if kind is Kind.REVOKE:
                said = self._give_up(token)
            elif kind is Kind.REFUSED:
                self._forget(token)
        if claim is not None:
            claim.settle(kind is Kind.CLAIMED)
        if not said:
            raise TransferError("the receiver does not read")

    def _give_up(self, token: bytes) -> bool:
        """Under the queue's lock: no piece is being copied now, and none of this token will be again."""
        claim = self._forget(token)
        if claim is None:
            return True
        claim.settle(False)
        return shm_wire.send(self._sock, Kind.QUIET, token)

    def _forget(self, token: bytes) -> _Claim | None:
        claim = self._claims.pop(token, None)
        if claim is not None:
            self._tokens.pop(claim.key, None)
        return claim

    def _break(self, reason: str) -> None:
        self._queue.fail_all(reason)
        with self._queue.lock:
            claims = list(self._claims.values())
        for claim in claims:
            claim.settle(False)


class ShmSender:
    """KVSender of the `shm` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._mover = load_mover()

    def reaches(self, offer: TransportOffer) -> bool:
        """See KVSender."""
        return offer.name == NAME and offer.host_id == host_id()

    def connect(self, offer: TransportOffer, pairing: Pairing) -> ShmWriter:
        """See KVSender."""
        secret, address = offer.advert[:TOKEN_BYTES], offer.advert[TOKEN_BYTES:].decode(errors="replace")
        if not address.startswith("\0tandem-kv-"):
            raise TransferError("not an advert of the shm transport")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(address)
            shm_wire.send(sock, Kind.HELLO, secret)
            num_blocks, fd = shm_wire.receive_region(sock)
            try:
                buffer = map_shared(fd, num_blocks * pairing.destination.worker_block_bytes)
            finally:
                os.close(fd)
            target = KVRegion.of(buffer, pairing.destination)
            sock.settimeout(None)
            return ShmWriter(self._region, sock, target, pairing, self._mover)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"shm: {error}") from None
        except TransferError:
            sock.close()
            raise
