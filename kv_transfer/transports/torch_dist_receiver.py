"""`torch_dist`, receiving end: payload comes through a process group, two-sided, into slots beside the pool.

Each peer has a connection for headers, a thread, and a communicator. What has come into a slot is put into place under
the lock of its grant, checksummed while it is in the cache; so a revocation is proven at once, though a receive may be
posted. Pieces that nobody wants any more are received past the pool, so that both sides stay in step.
"""

import hmac
import itertools
import logging
import secrets
import socket
import threading
from typing import Any

import numpy as np

from kv_transfer.checksum import crc32
from kv_transfer.landing import Landing
from kv_transfer.messages import CellRange, TransferKey, TransportOffer
from kv_transfer.region import KVRegion
from kv_transfer.transport import QuietListener
from kv_transfer.transports import claim_wire, communicator, torch_dist_wire
from kv_transfer.transports.accepting import accepted, begins
from kv_transfer.transports.claims import HELLO_S, MAX_WRITERS, hang_up
from kv_transfer.transports.communicator import GLOO, RECEIVER, SLOTS, Bytes, Communicator, CommunicatorBroken
from kv_transfer.transports.dial import advert_of, keep_alive, listen
from kv_transfer.transports.grants import TOKEN_BYTES, Grant, GrantTable
from kv_transfer.transports.torch_dist_wire import PIECE_BYTES, Header, Kind, Meeting
from tandem.errors import TransferError

NAME = "torch_dist"
STALL_S = 5.0
"""Most time for one piece to cross, and for both sides to meet."""
MAX_PAYLOAD_BYTES = 1 << 30

log = logging.getLogger(__name__)


class TorchDistReceiver:
    """KVReceiver of the `torch_dist` transport; see communicator.problem. Raises OSError."""

    name = NAME
    drain_proves_quiet = False

    def __init__(self, region: KVRegion, *, host: str = "127.0.0.1", stall_s: float = STALL_S) -> None:
        self._region = region
        self._stall_s = stall_s
        self._grants = GrantTable()
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._store: Any = communicator.serve_store(host, stall_s)
        self._server = listen(host)
        self._thread = threading.Thread(target=self._accept, name="kv-dist-accept", daemon=True)
        self._thread.start()

    def offer(self) -> TransportOffer:
        """See KVReceiver."""
        return TransportOffer(name=NAME, advert=advert_of(self._server, self._secret), host_id="")

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        """See KVReceiver."""
        return self._grants.open(key, landing).token

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """See KVReceiver."""
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """Always proven: see the module's docstring."""
        self._grants.revoke(key)
        return True

    def listen_quiet(self, listener: QuietListener) -> None:
        """Nothing to tell: every revocation is proven at once."""

    def close(self) -> None:
        """See KVReceiver. Waits for a piece that a peer has announced, `stall_s` at most."""
        self._grants.revoke_all()
        with self._lock:
            self._closing.set()
            peers = dict(self._peers)
        hang_up(self._server)
        self._thread.join()
        self._server.close()
        for sock, thread in peers.items():
            hang_up(sock)
            thread.join()
        self._store = None

    def _accept(self) -> None:
        for sock in accepted(self._server, self._closing, NAME):
            with self._lock:
                if self._closing.is_set() or len(self._peers) >= MAX_WRITERS:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="kv-dist-peer", daemon=True)
                if not begins(thread, NAME):
                    sock.close()
                    continue
                self._peers[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        group: Communicator | None = None
        numbers = {Kind.WRITE: itertools.count(1), Kind.RENEW: itertools.count()}
        try:
            keep_alive(sock)
            meeting = self._greet(sock)
            while (data := claim_wire.receive_exactly(sock, torch_dist_wire.HEADER_BYTES)) is not None:
                header = torch_dist_wire.unpack_header(data)
                if header.number != next(numbers[header.kind]):
                    # Not before gloo: a receive of another size than what is sent to it ends the whole process.
                    raise TransferError(f"{header.kind.name} {header.number} out of turn")
                if header.kind is Kind.RENEW:
                    _close(group)
                    group = self._join(sock, meeting, header.number)
                    continue
                kind = Kind.REFUSED
                if group is not None:
                    try:
                        kind = self._take(group, header)
                    except CommunicatorBroken as error:
                        log.info("torch_dist: %s", error)
                        _close(group)
                        group = None
                self._answer(sock, kind, header.number)
        except (OSError, TransferError) as error:
            log.info("torch_dist sender dropped: %s", error)
        finally:
            _close(group)
            with self._lock:
                del self._peers[sock]
            hang_up(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> Meeting:
        sock.settimeout(HELLO_S)
        hello = claim_wire.receive(sock)
        if hello is None or hello[0] is not claim_wire.Kind.HELLO or not hmac.compare_digest(hello[1], self._secret):
            raise TransferError("no HELLO, or a wrong secret")
        meeting = Meeting(backend=GLOO, store_port=self._store.port, prefix=secrets.token_hex(8))
        claim_wire.send_blob(sock, torch_dist_wire.pack_meeting(meeting))
        sock.settimeout(None)
        return meeting

    def _join(self, sock: socket.socket, meeting: Meeting, number: int) -> Communicator | None:
        """None when the peer did not come: it will say so by another RENEW, or end."""
        address = sock.getsockname()[0]
        try:
            return Communicator(self._store, meeting, number, RECEIVER, address=address, limit_s=self._stall_s)
        except TransferError as error:
            log.info("torch_dist sender is late: %s", error)
            return None

    def _answer(self, sock: socket.socket, kind: Kind, number: int) -> None:
        answer = torch_dist_wire.pack_answer(kind, number)
        try:
            count = sock.send(answer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        if count != len(answer):
            raise TransferError("the sender does not read its answers")

    def _take(self, group: Communicator, header: Header) -> Kind:
        """Receive a payload into its destinations, or past them. Raises CommunicatorBroken."""
        if header.payload_bytes > MAX_PAYLOAD_BYTES:
            raise TransferError(f"a payload of {header.payload_bytes} bytes: at most {MAX_PAYLOAD_BYTES} are taken")
        grant = self._grants.find(header.token)
        room = self._room(header, grant)
        sizes = [min(PIECE_BYTES, header.payload_bytes - at) for at in range(0, header.payload_bytes, PIECE_BYTES)]
        checksum = 0
        for i, size in enumerate(sizes[:SLOTS]):
            group.post(i, size)
        for i, size in enumerate(sizes):
            slot = i % SLOTS
            group.wait(slot)
            piece = group.slots[slot][:size]
            checksum = crc32(piece.data, checksum)
            if grant is not None and room is not None and not _land(grant, room, piece):
                room = None
            if i + SLOTS < len(sizes):
                group.post(slot, sizes[i + SLOTS])
        if grant is None or room is None:
            return Kind.REFUSED
        grant.landing.landed(header.cells, checksum)
        return Kind.DONE

    def _room(self, header: Header, grant: Grant | None) -> list[memoryview] | None:
        if grant is None:
            return None
        with grant.lock:
            if grant.revoked:
                return None
            try:
                room = grant.landing.room(header.cells)
            except TransferError:
                return None
        if sum(view.nbytes for view in room) != header.payload_bytes:
            raise TransferError(f"{header.payload_bytes} payload bytes do not fit their cells")
        return room


def _land(grant: Grant, room: list[memoryview], piece: Bytes) -> bool:
    """Put a piece at the front of what room is left; False once the grant is revoked."""
    at = 0
    with grant.lock:
        if grant.revoked:
            return False
        while at < piece.nbytes:
            view = room[0]
            size = min(view.nbytes, piece.nbytes - at)
            np.copyto(np.frombuffer(view[:size], np.uint8), piece[at : at + size])
            at += size
            if size == view.nbytes:
                room.pop(0)
            else:
                room[0] = view[size:]
    return True


def _close(group: Communicator | None) -> None:
    if group is not None:
        group.close()
