"""Framed messages between rank 0 and one other rank: over a pair of connected Unix sockets, or between nodes in TLS.

A socket pair has no name that anybody else could connect to; the kernel closes it with its process, so the end of the
stream is the end of the peer. A frame is one byte of kind, four of length, then the payload; descriptors travel beside
the payload's first byte. Between nodes (see engine.distributed.links.listener) the kernel says as much of a
connection, and no descriptor travels.
"""

import array
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from engine.distributed.links.lost import RankLost
from tandem.errors import ConfigError

_HEADER = struct.Struct("<BI")
MOST_PAYLOAD_BYTES = 1 << 30
_MAX_FDS = 1


class ChannelKind(IntEnum):
    """What a message is. The arrows: rank 0 is on the left."""

    READY = 1
    """<- alive, waiting for the set-up."""
    SETUP = 2
    """-> JSON of RankSetup; with the descriptor of the group's store."""
    LOADED = 3
    """<- JSON of RankFacts."""
    REFUSED = 4
    """<- why this configuration or model cannot be served, as text."""
    DRY_RUN = 5
    """-> JSON of KVLayout: the steps up to MEASURE run over a pool of one block."""
    MEASURE = 6
    """-> how much memory did they take?"""
    MEASURED = 7
    """<- JSON of bytes, or null."""
    POOL = 8
    """-> JSON of PoolPlan: what KV cache to serve with; with the descriptor of the memory, if it is shared."""
    POOL_READY = 9
    """<- it is there."""
    STEP = 10
    """-> see engine.distributed.wire.steps."""
    HELLO = 11
    """<- JSON: who comes from another node; see engine.distributed.links.handshake, also for the next four."""
    CHALLENGE = 12
    """-> JSON: proof that this is the leader, and what the other is to prove."""
    PROOF = 13
    """<- the proof."""
    WELCOME = 14
    """-> taken in."""
    ASK = 15
    """<- JSON, on a rank's second connection: a pulse, or something of the store: engine.ranks.pulse."""
    ANSWER = 16
    """-> JSON."""
    PLACE = 17
    """-> blocks that came from elsewhere; see engine.distributed.wire.mirrored_blocks, also for the next two."""
    FETCH = 18
    """-> which blocks rank 0 wants to have, too."""
    BLOCKS = 19
    """<- their content."""


class RankChannel:
    """One end. Used by one thread."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        carries_descriptors: bool = True,
        most_bytes: int = MOST_PAYLOAD_BYTES,
    ) -> None:
        """`most_bytes`: of a payload; who is not known yet is not believed when it announces much."""
        self._socket = sock
        self._peer = peer
        self._carries_descriptors = carries_descriptors
        self.most_bytes = most_bytes
        self._header = bytearray(_HEADER.size)
        self._payload = bytearray()

    def send(self, kind: ChannelKind, payload: bytes = b"", *, fd: int | None = None) -> None:
        """Send a message; waits for room as long as the socket's timeout allows. Raises RankLost."""
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
        """The next message: kind, payload (valid until the next call), descriptor. None when the peer has ended.

        Raises RankLost when the peer is silent for the socket's timeout, or talks nonsense.
        """
        try:
            fds = self._fill_header()
            if fds is None:
                return None
            number, size = _HEADER.unpack(self._header)
            if size > self.most_bytes:
                raise RankLost(f"{self._peer} announces {size} bytes")
            if len(self._payload) < size:
                self._payload = bytearray(size)
            payload = memoryview(self._payload)[:size]
            if self._fill(payload) < size:
                return None
            return ChannelKind(number), payload, fds[0] if fds else None
        except (OSError, ValueError) as error:
            raise RankLost(f"{self._peer} does not answer: {error}") from None

    def expect(self, kind: ChannelKind) -> tuple[memoryview, int | None]:
        """Payload and descriptor of the next message, which is to be of this kind.

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
        """How long later calls wait for the peer; None for ever."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """The peer sees the end."""
        self._socket.close()

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages."""
        return self._peer

    def hang_up(self) -> None:
        """Shut down both directions, from any thread; wakes blocked calls. `close` must still be called."""
        with suppress(OSError):
            # Not SSLSocket's own method: that one forgets the cipher, and who reads next gets ciphertext.
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
