"""`tcp`, receiving end: accepts connections, authenticates them, and tracks who is connected.

Each stream has its own thread (see inbound.py), which also performs its TLS handshake: a slow one delays no other.
Malformed bytes end their own connection only; the streams of one sender's connection end together.
"""

import hmac
import json
import logging
import secrets
import socket
import threading
import time

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.mover import load_mover
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.accept import accept_connections, start_serving
from kv_transfer.transports.grants import TOKEN_BYTES, GrantTable
from kv_transfer.transports.interface import QuietListener
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.channel import ByteChannel, PlainChannel, hang_up
from kv_transfer.transports.tcp.frames import FrameKind
from kv_transfer.transports.tcp.inbound import Inbound, Peer, answer, next_header
from kv_transfer.transports.tcp.settings import MAX_STREAMS, NAME, NO_CERTIFICATES, PLAIN, TcpSettings
from kv_transfer.transports.tcp.tls import TlsChannel
from tandem.errors import TransferError
from tandem.rpc.refusal_log import RefusalLog

MAX_CONNECTIONS = 256
"""Maximum number of authenticated senders, each with up to MAX_STREAMS streams."""
MAX_GREETING = 32
"""Maximum number of connections that have not authenticated yet; a new one replaces the oldest."""

log = logging.getLogger(__name__)


class TcpReceiver:
    """KVReceiver of the `tcp` transport; listens on `host`, at a free port unless one is given. Raises OSError."""

    name = NAME
    drain_proves_quiet = False

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, settings: TcpSettings = PLAIN) -> None:
        self._settings = settings
        self._mover = load_mover()
        self._grants = GrantTable()
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self._refusals = RefusalLog(NAME)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: dict[ByteChannel, threading.Thread] = {}
        self._greeting: dict[ByteChannel, None] = {}
        self._peers: dict[int, Peer] = {}
        self._streams: set[Inbound] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self._address = self._server.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def offer(self) -> TransportOffer:
        host, port = self._address
        tls = self._settings.tls.fingerprint.hex() if self._settings.tls is not None else ""
        advert = {"host": host, "port": port, "tls": tls, "secret": self._secret.hex()}
        return TransportOffer(name=NAME, advert=json.dumps(advert).encode(), host_id="")

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        return self._grants.open(key, landing).token

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        return self._grants.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        """End a grant: proven at once for received bytes (see inbound.py), unless a device is still settling some of
        them."""
        grant = self._grants.revoke(key)
        if grant is not None:
            with self._lock:
                streams = list(self._streams)
            for stream in streams:
                stream.await_quiet(grant)
        return self._grants.is_quiet(key)

    def listen_quiet(self, listener: QuietListener) -> None:
        self._grants.listen_quiet(listener)

    def close(self) -> None:
        self._grants.revoke_all()
        with self._lock:
            self._closing.set()
            connections = dict(self._connections)
        hang_up(self._server)
        self._thread.join()
        self._server.close()
        for channel, thread in connections.items():
            with self._lock:
                if channel in self._connections:
                    channel.hang_up()
            thread.join()

    def _accept(self) -> None:
        for sock in accept_connections(self._server, self._closing, self._refusals):
            try:
                channel = self._channel(sock)
            except OSError as error:
                self._refusals.record("a connection was dropped", error)
                sock.close()
                continue
            self._start(channel)

    def _channel(self, sock: socket.socket) -> ByteChannel:
        return PlainChannel(sock) if self._settings.tls is None else self._settings.tls.serve(sock)

    def _start(self, channel: ByteChannel) -> None:
        with self._lock:
            if self._closing.is_set():
                channel.close()
                return
            if len(self._greeting) >= MAX_GREETING:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                oldest.hang_up()
            thread = threading.Thread(target=self._serve, args=(channel,), name="kv-tcp-peer", daemon=True)
            if not start_serving(thread, self._refusals):
                channel.close()
                return
            self._connections[channel] = thread
            self._greeting[channel] = None

    def _serve(self, channel: ByteChannel) -> None:
        name, peer, is_known = 0, Peer(), False
        try:
            deadline_s = time.monotonic() + self._settings.stall_s
            self._secure(channel, deadline_s)
            name, peer, seed = self._handshake(channel, deadline_s)
            is_known = True
            stall_s = self._settings.stall_s
            self._run(Inbound(channel, peer, self._grants, seed=seed, mover=self._mover, stall_s=stall_s))
        except (OSError, TransferError) as error:
            if is_known:
                log.info("tcp sender dropped: %s", error)
            else:
                self._refusals.record("a connection was dropped before it was served", error)
        finally:
            with self._lock:
                del self._connections[channel]
                self._greeting.pop(channel, None)
                self._end(name, peer)
                # Under the lock, so that a concurrent hang_up cannot reach a reused descriptor.
                peer.channels.discard(channel)
                channel.hang_up()
                channel.close()

    def _run(self, stream: Inbound) -> None:
        with self._lock:
            self._streams.add(stream)
        try:
            stream.run()
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _secure(self, channel: ByteChannel, deadline_s: float) -> None:
        """Refuse a peer that uses TLS where it is not configured, or the reverse; complete the TLS handshake."""
        first, tls = channel.first_byte(_left_s(deadline_s)), self._settings.tls
        if first is not None and (first == tcp_frames.TLS_HANDSHAKE) != isinstance(channel, TlsChannel):
            if tls is not None:
                channel.send_in_the_clear(tcp_frames.pack_answer(FrameKind.NEEDS_TLS, 0))
                raise TransferError(f"the sender does not use TLS, but {tls.setting} is set here")
            channel.send_in_the_clear(tcp_frames.TLS_ALERT)
            raise TransferError(f"the sender uses TLS, and {NO_CERTIFICATES}")
        if isinstance(channel, TlsChannel):
            channel.do_handshake(deadline_s)

    def _handshake(self, channel: ByteChannel, deadline_s: float) -> tuple[int, Peer, int]:
        header = next_header(channel, within_s=_left_s(deadline_s))
        if header is None or header.kind is not FrameKind.HELLO or not hmac.compare_digest(header.token, self._secret):
            raise TransferError("no HELLO, or a wrong secret")
        name = header.write_id
        with self._lock:
            if channel not in self._greeting:
                raise TransferError("too many connections are waiting to send their HELLO")
            if name not in self._peers and len(self._peers) >= MAX_CONNECTIONS:
                raise TransferError(f"{MAX_CONNECTIONS} senders are connected already")
            peer = self._peers.setdefault(name, Peer())
            if len(peer.channels) >= MAX_STREAMS:
                raise TransferError(f"the sender has more than {MAX_STREAMS} streams")
            del self._greeting[channel]
            peer.channels.add(channel)
        answer(channel, FrameKind.DONE, name)
        return name, peer, tcp_frames.seed_of(name, header.payload_bytes)

    def _end(self, name: int, peer: Peer) -> None:
        """End all streams of a sender together."""
        peer.ended = True
        if self._peers.get(name) is peer:
            del self._peers[name]
        for channel in peer.channels:
            channel.hang_up()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
