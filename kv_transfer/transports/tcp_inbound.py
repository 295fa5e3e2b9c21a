"""`tcp`, receiving end of one stream: frames in order, each payload straight into its destinations.

Bytes land under the stream's own lock, so that streams do not wait for each other, and one call that does not wait at a
time. So a revocation is proven at once: once a grant is marked, each stream that was landing for it need only be met
between two calls. What still comes for it is read into scratch memory, and the stream goes on serving other grants.
Each piece is checksummed as soon as it has landed, while the cache has it.
"""

import itertools
import threading
from dataclasses import dataclass, field

from kv_transfer.transports import tcp_wire
from kv_transfer.transports.grants import Grant, GrantTable
from kv_transfer.transports.tcp_channel import Channel, receive_exactly
from kv_transfer.transports.tcp_pieces import pieces, take
from kv_transfer.transports.tcp_wire import Header, Kind
from tandem.errors import TransferError

MAX_PAYLOAD_BYTES = 1 << 30
"""Of one frame, whether or not anybody wants it; many times a chunk."""
_SCRATCH_BYTES = 256 << 10


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """The streams of one sender's connection; they end together."""

    channels: set[Channel] = field(default_factory=set)
    ended: bool = False
    """Nothing more lands, whatever the kernel still holds."""


class Inbound:
    """A stream whose HELLO was accepted; `run` serves it on the caller's thread."""

    def __init__(self, channel: Channel, peer: Peer, grants: GrantTable, *, seed: int, stall_s: float) -> None:
        self._channel = channel
        self._peer = peer
        self._grants = grants
        self._seed = seed
        self._stall_s = stall_s
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._lock = threading.Lock()
        self._landing: Grant | None = None

    def run(self) -> None:
        """Until the sender ends. Raises OSError, or TransferError for a sender that cannot be trusted any more."""
        for number in itertools.count(1):
            header = next_header(self._channel, seed=self._seed, within_s=self._stall_s, patient=True)
            if header is None:
                return
            if header.kind is not Kind.WRITE or header.write_id != number:
                raise TransferError(f"frame {header.write_id} instead of {number}")
            answer(self._channel, self._take(header), number)

    def await_quiet(self, revoked: Grant) -> None:
        """On return nothing lands for this grant any more. On any thread, and not before the grant is revoked."""
        if self._landing is revoked:
            with self._lock:
                return

    def _take(self, header: Header) -> Kind:
        """Receive a payload into its destinations, or past them when it has none."""
        grant = self._grants.find(header.token)
        room = self._room(header, grant) if grant is not None else []
        if grant is None or not room:
            self._skip(header.payload_bytes)
            return Kind.REFUSED
        # Set before the grant is looked at: so either this sees the revocation, or whoever revokes sees this.
        self._landing = grant
        landed, checksum = self._land(grant, room)
        self._landing = None
        self._skip(header.payload_bytes - landed)
        with grant.lock:
            if grant.revoked:
                return Kind.REFUSED
            grant.landing.landed(header.cells, checksum)
        return Kind.DONE

    def _room(self, header: Header, grant: Grant) -> list[memoryview]:
        """Where the payload goes; nowhere when the grant has ended or has not got these cells."""
        with grant.lock:
            if grant.revoked:
                return []
            try:
                room = grant.landing.room(header.cells)
            except TransferError:
                return []
        if sum(map(len, room)) != header.payload_bytes:
            raise TransferError(f"{header.payload_bytes} payload bytes do not fit their cells")
        return room

    def _land(self, grant: Grant, room: list[memoryview]) -> tuple[int, int]:
        """(bytes, their CRC-32) that have come before all had or the grant was revoked."""
        landed = checksum = 0
        for piece in pieces(room, self._channel.piece_bytes):
            while piece:
                with self._lock:
                    if grant.revoked:
                        return landed, checksum
                    if self._peer.ended:
                        raise TransferError("another stream of this sender has ended")
                    count = self._channel.receive(piece)
                    if count:
                        checksum = take(piece, count, checksum)
                        landed += count
                if piece:
                    self._wait(count)
        return landed, checksum

    def _skip(self, num_bytes: int) -> None:
        left = num_bytes
        while left:
            count = self._channel.receive([self._scratch[:left]])
            left -= count or 0
            # What came may have more behind it that TLS has decrypted already: of that no poll would tell.
            if left and not count:
                self._wait(count)

    def _wait(self, count: int | None) -> None:
        """For more than the last call has had."""
        if count == 0:
            raise TransferError("the sender ended in the middle of a frame")
        self._channel.wait_readable(self._stall_s)


def next_header(channel: Channel, *, seed: int = 0, within_s: float, patient: bool = False) -> Header | None:
    """The next frame's, or None at the end. Raises OSError, and TransferError for what is none or comes too slowly."""
    data = receive_exactly(channel, tcp_wire.HEADER_BYTES, within_s=within_s, patient=patient)
    if data is None:
        return None
    header = tcp_wire.unpack_header(data, seed)
    if header.payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a payload of {header.payload_bytes} bytes: at most {MAX_PAYLOAD_BYTES} are taken")
    return header


def answer(channel: Channel, kind: Kind, write_id: int) -> None:
    """Answer a frame. Raises OSError, or TransferError when the sender leaves no room for it."""
    data = tcp_wire.pack_answer(kind, write_id)
    if channel.send([memoryview(data)]) != len(data) or not channel.flush():
        raise TransferError("the sender does not read its answers")
