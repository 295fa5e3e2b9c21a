"""Interfaces of a transport: its receiving end, its sending end, and the connection between two.

A receiving end lets peers write into granted blocks of its region; a sending end writes ranges of its own region
through such a grant. Frames name indices in the receiver's reservation, never addresses. Both ends can prove that they
are quiet: after that no byte of an attempt lands in, or is read from, this process's memory.

Ends are used from an event loop but move bytes on threads of their own. Except for `connect` and `close`, no call
blocks longer than one burst of a copy.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.memory.landing import Landing
from kv_transfer.protocol.messages import TransferKey, TransportOffer

QuietListener = Callable[[TransferKey], None]
"""Called on any thread when an attempt becomes quiet whose revocation was not proven at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """A chunk to be written."""

    key: TransferKey
    grant: bytes
    cells: CellRange
    source: PlacedCells
    """Position of those cells in this worker's pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Result of a completed write: the chunk is in the remote memory."""

    checksum: int
    """Checksum of the bytes as sent, in the order of the wire."""
    num_bytes: int
    seconds: float


class KVReceiver(Protocol):
    """The receiving end: one per worker and transport."""

    @property
    def name(self) -> str: ...

    @property
    def drain_proves_quiet(self) -> bool:
        """Whether everything has landed once the sender reports that it has stopped."""

    def offer(self) -> TransportOffer:
        """Describe this end to senders."""

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        """Let the holder of the returned token write into these cells, by index."""

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """Whether these cells arrived as they were sent; if so, they are then in place: converted and copied to all
        ranks.

        On any thread, but at most once per write. False after the grant has ended.
        """

    def revoke(self, key: TransferKey) -> bool:
        """End a grant, known or not. True: no byte can land under it any more; False: the quiet listener is called
        later."""

    def listen_quiet(self, listener: QuietListener) -> None:
        """Set the callback for late proofs; called once, before the first grant."""

    def close(self) -> None:
        """Drop every peer and stop every thread; afterwards nothing lands."""


class PeerWriter(Protocol):
    """The sending end's connection to one receiver."""

    @property
    def closed(self) -> bool:
        """Whether the connection is gone; every write fails then."""

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        """Write a chunk; the future succeeds once the bytes are in the remote memory, or fails with TransferError."""

    def cancel(self, key: TransferKey) -> bool:
        """Stop every write of this attempt. True: its sources are no longer read, and pending futures fail.

        False: a future that is still pending ends as soon as its sources are no longer read.
        """

    def close(self) -> None:
        """Stop every write, drop the connection and stop every thread."""


class KVSender(Protocol):
    """The sending end: one per worker and transport."""

    @property
    def name(self) -> str: ...

    def reaches(self, offer: TransportOffer) -> bool:
        """Whether that receiver is reachable in principle: same transport and, where required, same host."""

    @property
    def one_sided(self) -> bool:
        """Whether bytes land without the receiver's help; they must then travel in the destination's dtype."""

    def connect(self, offer: TransportOffer, pairing: Pairing) -> PeerWriter:
        """Connect; may block for several seconds. Raises TransferError."""
