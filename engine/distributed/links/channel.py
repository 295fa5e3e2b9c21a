"""Framed messages between rank 0 and one other rank: over a pair of connected Unix sockets, or between nodes in TLS.

A socket pair has no name that another process could connect to; the kernel closes it with its process, so the end of
the stream is the end of the peer. A frame is one byte of kind, four of length, then the payload; descriptors travel
beside the payload's first byte. Between nodes (see engine.distributed.links.listener) the end of a connection is the
end of the peer as well, and no descriptors travel.
"""

import array
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from engine.distributed.links.decrypted import decrypted
from engine.distributed.links.lost import RankLost
from tandem.errors import ConfigError

_HEADER = struct.Struct("<BI")
MOST_PAYLOAD_BYTES = 1 << 30
_KEPT_BYTES = 16 << 20
_MAX_FDS = 1


class ChannelKind(IntEnum):
    """Kind of a message; -> is sent by rank 0, <- by the other rank."""

    READY = 1
    """<- alive, waiting for the setup."""
    SETUP = 2
    """-> JSON of RankSetup; with the descriptor of the group's store."""
    LOADED = 3
    """<- JSON of RankFacts."""
    REFUSED = 4
    """<- text: why the rank cannot serve this configuration or model."""
    DRY_RUN = 5
    """-> JSON of PoolPlan: the steps up to MEASURE run over this pool, of one block."""
    MEASURE = 6
    """-> asks for the memory that these steps took."""
    MEASURED = 7
    """<- JSON: number of bytes, or null."""
    POOL = 8
    """-> JSON of PoolPlan: the KV cache to serve with; with the descriptor of its memory, if that is shared."""
    POOL_READY = 9
    """<- the KV cache is ready."""
    STEP = 10
    """-> inputs of a step; see engine.distributed.wire.steps."""
    HELLO = 11
    """<- JSON of the joining rank; see engine.distributed.links.handshake, also for the next four."""
    CHALLENGE = 12
    """-> JSON: proof that this is the leader, and a random number for the other's proof."""
    PROOF = 13
    """<- proof that the rank knows the secret."""
    WELCOME = 14
    """-> the rank is accepted; a token."""
    ASK = 15
    """<- JSON, on a rank's last connection: a heartbeat or a store request; see
    engine.distributed.links.rendezvous.
    """
    ANSWER = 16
    """-> JSON: answer to ASK."""
    PLACE = 17
    """-> blocks to write; see engine.distributed.wire.mirrored_blocks, also for the next two."""
    FETCH = 18
    """-> ids of blocks whose content rank 0 needs."""
    BLOCKS = 19
    """<- content of these blocks."""
    ADAPTER = 20
    """-> what a slot for adapters holds from now on; see engine.adapters.packing."""


class RankChannel:
    """One end of a connection. Used by one thread."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        carries_descriptors: bool = True,
        most_bytes: int = MOST_PAYLOAD_BYTES,
    ) -> None:
        """`most_bytes`: largest payload accepted; small until the peer is authenticated."""
        self._socket = sock
        self._peer = peer
        self._carries_descriptors = carries_descriptors
        self.most_bytes = most_bytes
        self._header = bytearray(_HEADER.size)
        self._payload = bytearray()

    def send(self, kind: ChannelKind, payload: bytes = b"", *, fd: int | None = None) -> None:
        """Send a message, waiting for buffer space as long as the timeout allows. Raises RankLost."""
        frame = _HEADER.pack(kind, len(payload)) + payload
        try:
            if fd is None:
                self._socket.sendall(frame)
            else:
                sent = socket.send_fds(self._socket, [frame], [fd])
                self._socket.sendall(frame[sent:])
        except OSError as error:
            raise RankLost(f"{self._peer} does not accept messages: {error}") from None

    def receive(self) -> tuple[ChannelKind, memoryview, int | None] | None:
        """Wait for the next message: kind, payload (valid until the next call), descriptor. None when the peer has
        ended.

        Raises RankLost when the peer is silent for the socket's timeout, or sends a malformed message.
        """
        try:
            fds = self._fill_header()
            if fds is None:
                return None
            number, size = _HEADER.unpack(self._header)
            if size > self.most_bytes:
                raise RankLost(f"{self._peer} announces {size} bytes; at most {self.most_bytes} are accepted")
            buffer = self._payload if len(self._payload) >= size else bytearray(size)
            if size <= _KEPT_BYTES:  # a larger one is rare, and goes with its message
                self._payload = buffer
            payload = memoryview(buffer)[:size]
            if self._fill(payload) < size:
                return None
            return ChannelKind(number), payload, fds[0] if fds else None
        except (OSError, ValueError) as error:
            raise RankLost(f"{self._peer} does not answer: {error}") from None

    def expect(self, kind: ChannelKind) -> tuple[memoryview, int | None]:
        """Receive a message, which must be of this kind. Returns payload and descriptor.

        Raises ConfigError when the peer refuses the request, RankLost when it answers anything else or has ended.
        """
        message = self.receive()
        if message is None:
            raise RankLost(f"{self._peer} has ended")
        if message[0] is ChannelKind.REFUSED:
            raise ConfigError(f"{self._peer}: {bytes(message[1]).decode(errors='replace')}")
        if message[0] is not kind:
            raise RankLost(f"{self._peer} sent {message[0].name}, not {kind.name}")
        return message[1:]

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound the time that later calls wait for the peer, in seconds; None: no bound."""
        self._socket.settimeout(timeout_s)

    def into_socket(self) -> socket.socket:
        """Give the connection up to another protocol: returns a socket with its bytes, decrypted.

        This channel must not be used any more.
        """
        self._socket.settimeout(None)
        return decrypted(self._socket) if isinstance(self._socket, ssl.SSLSocket) else self._socket

    def close(self) -> None:
        """Close this end, which the peer notices."""
        self._socket.close()

    @property
    def peer(self) -> str:
        """Name of the peer, for messages."""
        return self._peer

    def hang_up(self) -> None:
        """Shut down both directions, from any thread; wakes blocked calls. `close` must still be called."""
        with suppress(OSError):
            # Not SSLSocket's own method: it drops the cipher, and a concurrent read would return ciphertext.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _fill_header(self) -> Sequence[int] | None:
        if not self._carries_descriptors:
            filled = self._fill(memoryview(self._header))
            return () if filled == len(self._header) else None
        ancillary_size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        count, ancillary, _flags, _address = self._socket.recvmsg_into([self._header], ancillary_size)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        rest = memoryview(self._header)[count:]
        return None if not count or self._fill(rest) < len(rest) else fds

    def _fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            count = self._socket.recv_into(view[done:])
            if not count:
                break
            done += count
        return done
