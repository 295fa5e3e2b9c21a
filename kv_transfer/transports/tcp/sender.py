"""`tcp`, sending end: payload goes from the pool directly into the sockets of a few streams to each receiver."""

import hmac
import json
import secrets
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.mover import Mover, load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.interface import WriteOrder, WriteResult
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.channel import ByteChannel, PlainChannel, receive_exactly, send_exactly
from kv_transfer.transports.tcp.frames import FrameHeader, FrameKind
from kv_transfer.transports.tcp.outbound import TcpStream
from kv_transfer.transports.tcp.settings import NAME, NO_CERTIFICATES, PLAIN, STALL_S, TcpSettings
from tandem.errors import TransferError
from tandem.rpc.mutual_tls import tls_reason

CONNECT_S = 5.0
"""Time for all streams to connect, handshakes included."""


class TcpWriter:
    """PeerWriter of the `tcp` transport. Each write uses the stream with the fewest pending writes."""

    def __init__(
        self,
        source: KVRegion,
        channels: list[ByteChannel],
        pairing: Pairing,
        *,
        name: int = 0,
        mover: Mover | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """Payload is sent by compiled code if there is a `mover`, otherwise by Python."""
        self._lock = threading.Lock()
        self._streams = [
            TcpStream(
                source,
                channel,
                pairing,
                seed=tcp_frames.seed_of(name, index),
                mover=mover,
                stall_s=stall_s,
                broken=self._break,
            )
            for index, channel in enumerate(channels)
        ]
        self._under_way = [0] * len(channels)
        for stream in self._streams:
            stream.start()

    @property
    def closed(self) -> bool:
        return any(stream.closed for stream in self._streams)

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        with self._lock:
            chosen = self._under_way.index(min(self._under_way))
            self._under_way[chosen] += 1
        future = self._streams[chosen].write(order)
        future.add_done_callback(lambda _future: self._ended(chosen))
        return future

    def cancel(self, key: TransferKey) -> bool:
        return all([stream.cancel(key) for stream in self._streams])

    def close(self) -> None:
        self._break("connection closed")
        for stream in self._streams:
            stream.close()

    def _ended(self, chosen: int) -> None:
        with self._lock:
            self._under_way[chosen] -= 1

    def _break(self, reason: str) -> None:
        """End all streams together."""
        for stream in self._streams:
            stream.fail(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advert:
    host: str
    port: int
    secret: bytes
    fingerprint: bytes
    """SHA-256 fingerprint of the receiver's certificate; empty when it does not use TLS."""


class TcpSender:
    """KVSender of the `tcp` transport."""

    name = NAME
    one_sided = False

    def __init__(self, region: KVRegion, *, settings: TcpSettings = PLAIN) -> None:
        self._region = region
        self._settings = settings
        self._mover = load_mover()

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == NAME

    def connect(self, offer: TransportOffer, pairing: Pairing) -> TcpWriter:
        advert = _parse(offer.advert)
        if advert.fingerprint and self._settings.tls is None:
            raise TransferError(f"the receiver accepts only TLS, and {NO_CERTIFICATES}")
        if self._settings.tls is not None and not advert.fingerprint:
            raise TransferError(f"the receiver does not use TLS, but {self._settings.tls.setting} is set here")
        deadline_s = time.monotonic() + CONNECT_S
        name = secrets.randbits(64)
        channels: list[ByteChannel] = []
        try:
            for index in range(self._settings.streams):
                channels.append(self._dial(advert, deadline_s))
                _handshake(channels[-1], tcp_frames.hello(advert.secret, name, index), deadline_s)
        except (OSError, TransferError) as error:
            for channel in channels:
                channel.close()
            raise TransferError(f"tcp {advert.host}:{advert.port}: {self._reason(error)}") from None
        stall_s = self._settings.stall_s
        return TcpWriter(self._region, channels, pairing, name=name, mover=self._mover, stall_s=stall_s)

    def _reason(self, error: OSError | TransferError) -> object:
        tls = self._settings.tls
        return tls_reason(error, tls.setting) if isinstance(error, ssl.SSLError) and tls is not None else error

    def _dial(self, advert: _Advert, deadline_s: float) -> ByteChannel:
        sock = socket.create_connection((advert.host, advert.port), max(0.001, deadline_s - time.monotonic()))
        try:
            if self._settings.tls is None:
                return PlainChannel(sock)
            channel = self._settings.tls.dial(sock)
        except OSError:
            sock.close()
            raise
        try:
            channel.do_handshake(deadline_s)
            if not hmac.compare_digest(channel.peer_fingerprint(), advert.fingerprint):
                raise TransferError("the receiver's certificate is not the one that its advert names")
        except (OSError, TransferError):
            channel.close()
            raise
        return channel


def _handshake(channel: ByteChannel, hello: FrameHeader, deadline_s: float) -> None:
    left_s = max(0.0, deadline_s - time.monotonic())
    try:
        send_exactly(channel, tcp_frames.pack_header(hello), stall_s=left_s)
    except OSError:
        # A peer that refuses this certificate sends an alert after this half of the handshake; receiving raises it.
        channel.receive([memoryview(bytearray(1))])
        raise
    data = receive_exactly(channel, tcp_frames.ANSWER_BYTES, within_s=left_s)
    answer = None if data is None else tcp_frames.unpack_answer(data)
    if answer == (FrameKind.NEEDS_TLS, 0):
        raise TransferError(f"the receiver accepts only TLS, and {NO_CERTIFICATES}")
    if answer != (FrameKind.DONE, hello.write_id):
        raise TransferError("the receiver refused the connection")


def _parse(data: bytes) -> _Advert:
    try:
        fields = json.loads(data)
        advert = _Advert(
            host=str(fields["host"]),
            port=int(fields["port"]),
            secret=bytes.fromhex(fields["secret"]),
            fingerprint=bytes.fromhex(fields["tls"]),
        )
    except (ValueError, KeyError, TypeError):
        raise TransferError("not an advert of the tcp transport") from None
    if len(advert.secret) != TOKEN_BYTES:
        raise TransferError("not an advert of the tcp transport")
    return advert
