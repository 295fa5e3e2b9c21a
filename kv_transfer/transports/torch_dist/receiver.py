"""`torch_dist`, receiving end: payload comes through a process group and lands beside the pool first.

Each peer has a connection for headers, a thread, and a communicator: gloo for host memory, NCCL when both pools are on
GPUs (see device_to_device.py). intakes.py puts received payload into place.
"""

import hmac
import itertools
import logging
import secrets
import socket
import threading
from typing import Any

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.accept import accept_connections, start_serving
from kv_transfer.transports.dial import advert_of, listen
from kv_transfer.transports.grants import TOKEN_BYTES, GrantTable, WriteGrant
from kv_transfer.transports.interface import QuietListener
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import HELLO_S, MAX_WRITERS, hang_up
from kv_transfer.transports.torch_dist import communicator, nccl
from kv_transfer.transports.torch_dist import wire as torch_dist_wire
from kv_transfer.transports.torch_dist.communicator import (
    RECEIVER,
    Communicator,
    CommunicatorBroken,
    Rendezvous,
    over_gloo,
)
from kv_transfer.transports.torch_dist.device_to_device import between_devices, direct_device
from kv_transfer.transports.torch_dist.intakes import DeviceIntake, HostIntake, PayloadIntake
from kv_transfer.transports.torch_dist.wire import MAX_PAYLOAD_BYTES, MessageHeader, MessageKind, RendezvousOffer
from tandem.errors import TransferError
from tandem.rpc.hosts import keep_alive
from tandem.rpc.refusal_log import RefusalLog

NAME = "torch_dist"
STALL_S = 5.0
"""Longest time for one message of a communicator to cross, and for each step of creating one."""

log = logging.getLogger(__name__)


class TorchDistReceiver:
    """KVReceiver of the `torch_dist` transport; see communicator.problem. Raises OSError."""

    name = NAME
    drain_proves_quiet = False

    def __init__(
        self,
        region: KVRegion,
        *,
        host: str = "127.0.0.1",
        isolated_network: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._region = region
        self._isolated_network = isolated_network
        self._stall_s = stall_s
        self._grants = GrantTable()
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._refusals = RefusalLog(NAME)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        nccl.prepare(stall_s)
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._store: Any = communicator.serve_store(host, stall_s)
        self._server = listen(host)
        self._thread = threading.Thread(target=self._accept, name="kv-dist-accept", daemon=True)
        self._thread.start()

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, advert=advert_of(self._server, self._secret), host_id="")

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        return self._grants.open(key, landing).token

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """End a grant: proven at once for received bytes (see intakes.py), unless a device is still settling some of
        them."""
        self._grants.revoke(key)
        return self._grants.is_quiet(key)

    def listen_quiet(self, listener: QuietListener) -> None:
        self._grants.listen_quiet(listener)

    def close(self) -> None:
        """Close everything; waits up to `stall_s` for a burst that a peer has announced."""
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
        for sock in accept_connections(self._server, self._closing, self._refusals):
            with self._lock:
                # Forgotten only once they have ended: `close` must have waited for every thread.
                self._peers = {peer: thread for peer, thread in self._peers.items() if thread.is_alive()}
                if self._closing.is_set() or len(self._peers) >= MAX_WRITERS:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="kv-dist-peer", daemon=True)
                if not start_serving(thread, self._refusals):
                    sock.close()
                    continue
                self._peers[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        session: _Session | None = None
        try:
            keep_alive(sock)
            session = _Session(self._region, self._store, self._handshake(sock), sock.getsockname()[0], self._stall_s)
            while (data := one_sided_wire.receive_exactly(sock, torch_dist_wire.HEADER_BYTES)) is not None:
                header = torch_dist_wire.unpack_header(data)
                session.check_turn(header)
                if header.kind is not MessageKind.WRITE:
                    session.renew(header)
                    continue
                if header.payload_bytes > MAX_PAYLOAD_BYTES:
                    raise TransferError(
                        f"{header.payload_bytes} bytes announced, at most {MAX_PAYLOAD_BYTES} are accepted"
                    )
                landed = session.receive(header, self._grants.find(header.token))
                self._answer(sock, MessageKind.DONE if landed else MessageKind.REFUSED, header.number)
        except (OSError, TransferError) as error:
            if session is None:
                self._refusals.record("a connection was dropped before it was served", error)
            else:
                log.info("torch_dist sender dropped: %s", error)
        finally:
            if session is not None:
                session.close()
            hang_up(sock)
            sock.close()

    def _handshake(self, sock: socket.socket) -> RendezvousOffer:
        sock.settimeout(HELLO_S)
        hello = one_sided_wire.receive(sock)
        if (
            hello is None
            or hello[0] is not one_sided_wire.ClaimKind.HELLO
            or not hmac.compare_digest(hello[1], self._secret)
        ):
            raise TransferError("no HELLO, or a wrong secret")
        device = direct_device(self._region, isolated_network=self._isolated_network)
        meeting = RendezvousOffer(store_port=self._store.port, prefix=secrets.token_hex(8), device=device)
        one_sided_wire.send_blob(sock, torch_dist_wire.pack_rendezvous(meeting))
        sock.settimeout(None)
        return meeting

    def _answer(self, sock: socket.socket, kind: MessageKind, number: int) -> None:
        answer = torch_dist_wire.pack_answer(kind, number)
        try:
            count = sock.send(answer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        if count != len(answer):
            raise TransferError("the sender does not read its answers")


class _Session:
    """The current communicator with one sender; used by one thread."""

    def __init__(self, region: KVRegion, store: Any, meeting: RendezvousOffer, address: str, stall_s: float) -> None:
        self._region = region
        self._store = store
        self._meeting = meeting
        self._address = address
        self._stall_s = stall_s
        self._group: Communicator | None = None
        self._intake: PayloadIntake | None = None
        self._writes, self._renewals = itertools.count(1), itertools.count()

    def check_turn(self, header: MessageHeader) -> None:
        """Check a header's number before calling gloo: a receive of a wrong size ends the whole process.

        Raises TransferError.
        """
        numbers = self._writes if header.kind is MessageKind.WRITE else self._renewals
        if header.number != next(numbers):
            raise TransferError(f"{header.kind.name} {header.number} out of turn")

    def renew(self, header: MessageHeader) -> None:
        """Replace the communicator. A peer that did not join in time will ask again.

        Raises TransferError when the peer requests a path from device to device that was not offered.
        """
        self.close()
        pool = self._region.device if header.kind is MessageKind.RENEW_DIRECT else None
        if header.kind is MessageKind.RENEW_DIRECT and (pool is None or not self._meeting.device):
            raise TransferError("payload from device to device was announced but not offered")
        at = Rendezvous(
            store=self._store,
            meeting=self._meeting,
            number=header.number,
            rank=RECEIVER,
            address=self._address,
            limit_s=self._stall_s,
        )
        try:
            if pool is None:
                self._group = over_gloo(at)
                self._intake = HostIntake(self._group)
            else:
                self._group = between_devices(pool, at)
                self._intake = DeviceIntake(pool, self._group)
        except CommunicatorBroken as error:
            log.info("torch_dist sender is late: %s", error)

    def receive(self, header: MessageHeader, grant: WriteGrant | None) -> bool:
        """Receive a write's payload; returns whether it landed. Raises TransferError."""
        if self._intake is None:
            return False
        try:
            return self._intake.receive(header, grant)
        except CommunicatorBroken as error:
            log.info("torch_dist: %s", error)
            self.close()
            return False

    def close(self) -> None:
        """Break the communicator, if there is one."""
        group, self._group, self._intake = self._group, None, None
        if group is not None:
            group.close()
