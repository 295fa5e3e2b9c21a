"""`tcp`, receiving end of one stream: receives each frame's payload directly into its destinations.

Bytes land under the stream's own lock, so streams do not wait for each other, in non-blocking calls that end early when
another thread wants the lock. A revocation is therefore proven at once: after marking a grant, it only takes the lock
of each stream that is landing bytes for it. The rest of such a payload is read into scratch memory, and the stream goes
on serving other grants. Each burst is checksummed as soon as it has landed, while it is in the cache.
"""

import itertools
from dataclasses import dataclass, field

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.mover import Mover
from kv_transfer.memory.region import Bytes
from kv_transfer.memory.socket_stream import StreamStep
from kv_transfer.memory.write_stop_lock import BurstLock
from kv_transfer.transports.grants import GrantTable, WriteGrant
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.bursts import StreamPart, ViewsPart
from kv_transfer.transports.tcp.channel import ByteChannel, receive_exactly
from kv_transfer.transports.tcp.frames import FrameHeader, FrameKind
from tandem.errors import TransferError

MAX_PAYLOAD_BYTES = 1 << 30
"""Maximum payload of one frame, granted or not; many times a chunk."""
_SCRATCH_BYTES = 256 << 10


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """The streams of one sender's connection, which end together."""

    channels: set[ByteChannel] = field(default_factory=set)
    ended: bool = False
    """Whether the connection has ended: nothing more lands, even if the kernel still holds bytes."""


class Inbound:
    """A stream whose HELLO was accepted; `run` serves it on the caller's thread."""

    def __init__(
        self, channel: ByteChannel, peer: Peer, grants: GrantTable, *, seed: int, mover: Mover | None, stall_s: float
    ) -> None:
        """`seed`: of the CRCs of the stream's frames, see frames.seed_of."""
        self._channel = channel
        self._peer = peer
        self._grants = grants
        self._seed = seed
        self._mover = mover
        self._stall_s = stall_s
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._lock = BurstLock()
        self._landing: WriteGrant | None = None

    def run(self) -> None:
        """Serve frames until the sender ends. Raises OSError, or TransferError when the stream is out of step."""
        for number in itertools.count(1):
            header = next_header(self._channel, seed=self._seed, within_s=self._stall_s, patient=True)
            if header is None:
                return
            if header.kind is not FrameKind.WRITE or header.write_id != number:
                raise TransferError(f"frame {header.write_id} instead of {number}")
            answer(self._channel, self._receive(header), number)

    def await_quiet(self, revoked: WriteGrant) -> None:
        """Wait until no byte lands for this grant any more; on any thread, once the grant is revoked."""
        if self._landing is revoked:
            with self._lock:
                return

    def _receive(self, header: FrameHeader) -> FrameKind:
        """Receive a payload into its destinations, or into scratch memory when it has none."""
        grant = self._grants.find(header.token)
        parcel = self._part_of(header, grant) if grant is not None else None
        if grant is None or parcel is None:
            self._skip(header.payload_bytes)
            return FrameKind.REFUSED
        # Set before the grant is checked, so that either this thread sees the revocation or the revoking one sees this.
        self._landing = grant
        self._land(grant, parcel)
        self._landing = None
        self._skip(header.payload_bytes - parcel.num_moved)
        with grant.lock:
            if grant.revoked:
                return FrameKind.REFUSED
            grant.landing.landed(header.cells, parcel.checksum)
        return FrameKind.DONE

    def _part_of(self, header: FrameHeader, grant: WriteGrant) -> StreamPart | None:
        """The part that receives a payload into place; None when the grant has ended or lacks these cells."""
        spare = grant.landing.spare(header.cells)
        with grant.lock:
            if grant.revoked:
                return None
            try:
                parcel = self._open_part(grant.landing, header.cells, spare)
            except TransferError:
                return None
        if parcel.num_bytes != header.payload_bytes:
            raise TransferError(f"{header.payload_bytes} payload bytes do not fit their cells")
        return parcel

    def _open_part(self, landing: Landing, cells: CellRange, spare: Bytes | None) -> StreamPart:
        mover, descriptor = self._mover, self._channel.descriptor
        if mover is not None and descriptor is not None and (addresses := landing.addresses(cells)) is not None:
            return mover.streams.open(addresses, cells, descriptor, self._lock, is_sending=False)
        channel = self._channel
        return ViewsPart(
            landing.room(cells, spare), channel.receive, burst_bytes=channel.burst_bytes, at_zero=StreamStep.ENDED
        )

    def _land(self, grant: WriteGrant, parcel: StreamPart) -> None:
        """Receive until the part is complete or the grant revoked."""
        while True:
            with self._lock:
                if grant.revoked:
                    return
                if self._peer.ended:
                    raise TransferError("another stream of this sender has ended")
                progress = parcel.advance()
            if progress is StreamStep.DONE:
                return
            if progress is StreamStep.ENDED:
                raise TransferError("the sender ended in the middle of a frame")
            if progress is StreamStep.BLOCKED:
                self._channel.wait_readable(self._stall_s)

    def _skip(self, num_bytes: int) -> None:
        left = num_bytes
        while left:
            count = self._channel.receive([self._scratch[:left]])
            left -= count or 0
            if count == 0:
                raise TransferError("the sender ended in the middle of a frame")
            # TLS may have decrypted more bytes already, which no poll would report: wait only when there are none.
            if count is None:
                self._channel.wait_readable(self._stall_s)


def next_header(channel: ByteChannel, *, seed: int = 0, within_s: float, patient: bool = False) -> FrameHeader | None:
    """The next frame's header, or None at the end. Raises OSError, and TransferError for a malformed or late header."""
    data = receive_exactly(channel, tcp_frames.HEADER_BYTES, within_s=within_s, patient=patient)
    if data is None:
        return None
    header = tcp_frames.unpack_header(data, seed)
    if header.payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a payload of {header.payload_bytes} bytes, at most {MAX_PAYLOAD_BYTES} are accepted")
    return header


def answer(channel: ByteChannel, kind: FrameKind, write_id: int) -> None:
    """Answer a frame. Raises OSError, or TransferError when the sender does not read answers."""
    data = tcp_frames.pack_answer(kind, write_id)
    if channel.send([memoryview(data)]) != len(data) or not channel.flush():
        raise TransferError("the sender does not read its answers")
