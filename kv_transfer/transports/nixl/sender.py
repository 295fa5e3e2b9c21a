"""`nixl`, sending end: UCX writes from this pool into the receiver's, a few bursts ahead.

A posted write cannot be stopped from reading its source. A cancelled chunk's bursts are therefore awaited: `cancel`
returns False, and the chunk's future ends when they have. If they never end because the receiver is frozen, the end of
the connection ends the agent and with it the reading.

What lies in host memory goes from there to either kind of pool, and what lies on a device to another device: from pool
to pool. Converted payload, and payload from a device to host memory, goes by way of separate host memory. The checksum
is the one that the receiver computes where the payload lands: CRC-32 in host memory, `sum32` on a device.
"""

import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.layout.runs import RunPair, pair_runs
from kv_transfer.memory.checksum import RunningChecksum, RunningCrc32, RunningSum32
from kv_transfer.memory.departure import Departure, split_for_conversion
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.dial import dial, is_loopback_advert
from kv_transfer.transports.nixl.agent import AgentMemory, NixlAgent
from kv_transfer.transports.nixl.receiver import NAME, address_of, is_on_device, unpack_pool
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.writer import ClaimingWriter
from kv_transfer.transports.region_copy import bursts
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.values.ids import BlockId

BURST_BYTES = 1 << 20
DEVICE_BURST_BYTES = 8 << 20
"""From device to device: a burst of a megabyte would be over before the next look at it."""
BOUNCE_BYTES = 8 << 20
"""Size of the ring for converted cells: twice what is in flight, next to be posted, and being converted."""
DEPTH = 3
"""Bursts in flight: one on the wire, one behind it, one whose checksum is being computed."""


class NixlWriter(ClaimingWriter):
    """PeerWriter of the `nixl` transport."""

    def __init__(
        self, source: KVRegion, sock: socket.socket, pairing: Pairing, *, loopback: bool, to_device: bool = False
    ) -> None:
        """`to_device`: whether the receiver's pool is on a device. Raises OSError or TransferError."""
        self._pairing = pairing
        self._departure = Departure(source, pairing)
        self._broken = threading.Event()
        self._moving = threading.Lock()
        self._to_device = to_device
        metadata, peer = unpack_pool(one_sided_wire.receive_blob(sock), on_device=to_device)
        self._pool_blocks, rest = divmod(peer.size_bytes, pairing.destination.region_block_bytes)
        if rest or not self._pool_blocks:
            raise TransferError("the size of the receiver's pool does not match its layout")
        here, there = pairing.source.layer_block_bytes, pairing.destination.layer_block_bytes
        self._grain = here if here == there else min(here, there, BURST_BYTES)
        self._device = source.device if to_device and pairing.at_departure() is None else None
        """The source's device when payload goes from device to device."""
        self._burst_bytes = BURST_BYTES if self._device is None else DEVICE_BURST_BYTES
        self._bounces = self._departure.converts and self._device is None
        # Empty for a device: nothing here reads it byte by byte.
        self._memory = memoryview(bytearray(BOUNCE_BYTES)) if self._bounces else source.buffer
        memory = AgentMemory.on_host(self._memory) if self._bounces else AgentMemory.of_region(source)
        self._agent = NixlAgent(f"kv-{secrets.token_hex(8)}", memory, loopback=loopback)
        self._agent.add_remote(metadata, peer)
        sock.settimeout(None)
        super().__init__(sock, NAME)

    def close(self) -> None:
        self._broken.set()
        super().close()
        self._agent.close()

    def _perform(self, job: WriteJob) -> None:
        order = job.order
        token, slots = one_sided_wire.unpack_grant(order.grant)
        blocks = tuple(BlockId(slot) for slot in slots)
        target = self._pairing.at_destination(order.source.at.held_tokens, blocks, self._pool_blocks)
        copies: Iterable[RunPair]
        if self._bounces:
            # Cells that do not exist are rejected here: an error after the first write ends the connection.
            order.source.reads(order.cells)
            target.writes(order.cells)
            copies = self._converted(job, target)
        else:
            copies = order.source.run_pairs_to(target, order.cells)
        self._claim(job, token)
        with self._moving, self._under_way(job, token):
            known = None if self._device is None else self._device.checksum(order.source.reads(order.cells))
            job.succeed(*self._write(job, copies, known))

    def _converted(self, job: WriteJob, target: PlacedCells) -> Iterator[RunPair]:
        """Yield copies out of the bounce memory, a ring filled part by part while earlier parts are in flight."""
        order, at = job.order, 0
        payload = order.source.payload(order.cells)
        for cells in split_for_conversion(order.cells, payload, payload.num_bytes(self._pairing.wire_dtype)):
            # Without the queue's lock, which a device would hold for long and the event loop takes: the job is
            # `reading`.
            if job.stopped:
                return
            converted = self._departure.convert(order.source, cells)
            for burst in bursts(pair_runs([(0, converted.nbytes)], target.writes(cells)), BURST_BYTES):
                begin, size = burst[0][0], sum(length for _, _, length in burst)
                if at + size > BOUNCE_BYTES:
                    at = 0
                self._memory[at : at + size] = converted[begin : begin + size].data
                yield from [(at + here - begin, there, length) for here, there, length in burst]
                at += size

    def _write(self, job: WriteJob, copies: Iterable[RunPair], known: int | None) -> tuple[int, int]:
        """Returns (checksum, number of bytes). `known`: the checksum, where the device has computed it.

        After TransferError nothing is in flight any more.
        """
        total = 0
        checksum: RunningChecksum = RunningSum32() if self._to_device else RunningCrc32()
        flying: deque[int] = deque()
        try:
            for burst in bursts(copies, max(1, self._burst_bytes // self._grain) * self._grain):
                if job.stopped:
                    break
                flying.append(self._agent.post(burst, self._grain))
                total += sum(size for _, _, size in burst)
                if known is None:
                    # While the burst is in flight, so that one of the two finds the bytes in the cache.
                    for here, _, size in burst:
                        checksum.add(self._memory[here : here + size])
                while len(flying) >= DEPTH:
                    self._await(flying)
            while flying:
                self._await(flying)
        except TransferError as error:
            self._agent.close(flying)
            self._break(error.message)
            raise
        job.check()
        return checksum.value if known is None else known, total

    def _await(self, flying: deque[int]) -> None:
        if not self._agent.wait(flying[0], self._broken):
            raise TransferError("connection closed")
        flying.popleft()

    def _break(self, reason: str) -> None:
        super()._break(reason)
        self._broken.set()

    def _stopped(self) -> None:
        with self._moving:
            self._agent.close()


class NixlSender:
    """KVSender of the `nixl` transport."""

    name = NAME
    one_sided = True

    def __init__(self, region: KVRegion, *, isolated_network: bool = False) -> None:
        self._region = region
        self._isolated_network = isolated_network

    def reaches(self, offer: TransportOffer) -> bool:
        """Whether the offer is usable: nothing is encrypted, so other machines require an isolated network."""
        return offer.name == NAME and (self._isolated_network or is_loopback_advert(address_of(offer)))

    def connect(self, offer: TransportOffer, pairing: Pairing) -> NixlWriter:
        try:
            address = address_of(offer)
            sock = dial(address)
            try:
                loopback, to_device = is_loopback_advert(address), is_on_device(offer)
                return NixlWriter(self._region, sock, pairing, loopback=loopback, to_device=to_device)
            except (OSError, TransferError):
                sock.close()
                raise
        except (OSError, TransferError) as error:
            raise TransferError(f"{NAME}: {error}") from None
