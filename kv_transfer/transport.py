"""What moves the bytes: a registered region, and the two ends of a transport.

A receiving end lets peers write into granted blocks of its region; a sending end writes ranges of its own region
through such a grant. Frames name indices in the receiver's reservation, never addresses. Both ends can prove that they
are quiet: after that no byte of an attempt lands in, or is read from, this process's memory.

Ends are used from an event loop but move bytes on their own threads. No call here blocks longer than one piece of a
copy, `connect` and `close` excepted.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.messages import CellRange, TransferKey, TransportOffer
from tandem.errors import TransferError
from tandem.ids import BlockId
from tandem.kv_layout import KVLayout

QuietListener = Callable[[TransferKey], None]
"""Called on any thread when an attempt whose revocation was not proven at once is quiet after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRegion:
    """A worker's whole KV pool: contiguous bytes `[layer, block, layer_block_bytes]`, the layers of all its ranks."""

    buffer: memoryview
    num_layers: int
    num_blocks: int
    layer_block_bytes: int
    fd: int | None = None
    """Of the memory itself when it can be mapped by another process (see transports/shared_pool.py)."""

    @classmethod
    def of(cls, buffer: memoryview, layout: KVLayout, *, fd: int | None = None) -> "KVRegion":
        """The region that `buffer` (writable, contiguous) is under `layout`; ValueError when the sizes disagree."""
        flat = buffer.cast("B")
        num_blocks, rest = divmod(flat.nbytes, layout.worker_block_bytes)
        if flat.readonly or rest or not num_blocks:
            raise ValueError(f"{flat.nbytes} bytes are not a writable pool of {layout.worker_block_bytes}-byte blocks")
        return cls(
            buffer=flat,
            num_layers=layout.num_planes,
            num_blocks=num_blocks,
            layer_block_bytes=layout.layer_block_bytes,
            fd=fd,
        )

    def spans(self, cells: CellRange, blocks: Sequence[BlockId]) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes of each run of adjacent blocks, by layer, then in the order of `blocks`.

        `blocks` are the physical blocks of `cells`, in order. Raises TransferError when something lies outside the
        region.
        """
        runs = list(_runs(blocks))
        last_layer = cells.first_layer + cells.num_layers
        if cells.first_layer < 0 or last_layer > self.num_layers or len(blocks) != cells.num_blocks:
            raise TransferError("cells outside the KV region")
        if any(first < 0 or first + count > self.num_blocks for first, count in runs):
            raise TransferError("blocks outside the KV region")
        size = self.layer_block_bytes
        for layer in range(cells.first_layer, last_layer):
            base = layer * self.num_blocks
            for first, count in runs:
                yield (base + first) * size, count * size

    def views(self, cells: CellRange, blocks: Sequence[BlockId]) -> list[memoryview]:
        """The bytes of `spans`, without copying."""
        return [self.buffer[offset : offset + length] for offset, length in self.spans(cells, blocks)]


def _runs(blocks: Sequence[BlockId]) -> Iterator[tuple[int, int]]:
    """(first block, count) of each run of adjacent ascending blocks."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """One chunk to be written."""

    key: TransferKey
    grant: bytes
    cells: CellRange
    """Indices in the receiver's reservation."""
    sources: tuple[BlockId, ...]
    """Physical blocks here, one per block of `cells`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """A chunk that is in the remote memory."""

    checksum: int
    """Over the bytes as sent, in order of layer, then block."""
    num_bytes: int
    seconds: float


class KVReceiver(Protocol):
    """The receiving end: one per worker and transport."""

    @property
    def name(self) -> str:
        """Of the transport."""

    @property
    def drain_proves_quiet(self) -> bool:
        """Whether everything has landed once the sender says that it has stopped."""

    def offer(self) -> TransportOffer:
        """How a sender finds this end."""

    def open_grant(self, key: TransferKey, slots: Sequence[BlockId]) -> bytes:
        """Let the holder of the returned token write into these blocks, by index."""

    def revoke(self, key: TransferKey) -> bool:
        """End a grant, known or not. True: no byte of it can land any more; else the quiet listener will tell."""

    def listen_quiet(self, listener: QuietListener) -> None:
        """Set who is told about late proofs; called once, before the first grant."""

    def close(self) -> None:
        """Drop every peer and stop every thread; afterwards nothing lands."""


class PeerWriter(Protocol):
    """The sending end's connection to one receiver."""

    @property
    def closed(self) -> bool:
        """Whether the connection is gone; every write fails then."""

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        """Write a chunk; the future ends when the bytes are in the remote memory, or in a TransferError."""

    def cancel(self, key: TransferKey) -> bool:
        """Stop every write of this attempt. True: its sources are read no more. Pending futures fail."""

    def close(self) -> None:
        """Stop every write, drop the connection and stop every thread."""


class KVSender(Protocol):
    """The sending end: one per worker and transport."""

    @property
    def name(self) -> str:
        """Of the transport."""

    def reaches(self, offer: TransportOffer) -> bool:
        """Whether that receiver can be reached in principle: same transport, and same host where that matters."""

    def connect(self, offer: TransportOffer) -> PeerWriter:
        """Connect; blocks up to some seconds. Raises TransferError."""
