"""Interfaces of a region's ends, as the sessions in rank 0 use them: the region may be in this process or in a rank's.

One region of a worker's pool lies in the memory of one process, which opens the ends of every transport over it. What
is decided about it is decided in rank 0; nothing here decides anything. All methods are for the event loop's thread,
and none of them blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.interface import PeerWriter
from tandem.values.ids import BlockId
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGrant:
    """Destinations that a peer may write through one lane."""

    key: TransferKey
    """The attempt and the lane."""
    transport: str
    pairing: Pairing
    """Terms of the lane."""
    held_tokens: int
    blocks: tuple[BlockId, ...]
    """Destinations after the held prefix, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGrant:
    """The answer to a LaneGrant."""

    token: bytes
    """What the peer has to show."""
    drain_proves_quiet: bool
    """See KVReceiver."""


class ReceivingRegion(Protocol):
    """The receiving ends of one region."""

    async def offers(self) -> tuple[TransportOffer, ...]:
        """Describe the ends to senders, best first; adverts change when certificates are renewed."""

    def open_grant(self, grant: LaneGrant, opened: Callable[[OpenedGrant], None]) -> None:
        """Let the peer write; `opened` is called at once or later, unless the region's process has ended."""

    async def verify(self, transport: str, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        """Whether these cells arrived as they were sent; see KVReceiver."""

    def revoke(self, transport: str, key: TransferKey) -> bool:
        """End a grant, opened or not. True: no byte can land under it any more; False: `on_quiet` is called later."""

    def listen_quiet(self, on_quiet: Callable[[TransferKey], None]) -> None:
        """Set the callback for late proofs, called on any thread; once, before the first grant."""

    def close(self) -> None:
        """Close the ends: afterwards nothing lands. Blocks, and is called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRequest:
    """A lane to be connected, from a region to one of a peer's."""

    lane: int
    destination: KVLayout
    """The peer's layout."""
    offers: Sequence[TransportOffer]
    """Ends of the peer's region."""
    wire_dtype: str
    """Wanted dtype of KV on the wire; "" for the cheapest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedLane:
    """A lane with its connection."""

    transport: str
    wire_dtype: str
    writer: PeerWriter


class SendingRegion(Protocol):
    """The sending ends of one region."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that it can send with, best first."""

    async def connect(self, request: LaneRequest) -> ConnectedLane:
        """Connect through the best transport that works. Raises TransferError, with the reason for each, when none
        does.

        A connection that is made after the call was cancelled is closed.
        """
