"""The ends of a region in this process."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.dtype_conversion import Floats
from kv_transfer.layout.pairing import Pairing, choose_wire_dtype
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.regions.interface import ConnectedLane, LaneGrant, LaneRequest, OpenedGrant
from kv_transfer.transports.catalogue import candidates
from kv_transfer.transports.interface import KVReceiver, KVSender, PeerWriter
from tandem.errors import TransferError

_VERIFYING_ON_DEVICE = 4
"""Chunks verified at once in a pool on a device, where a thread mostly waits; in host memory it computes."""


class LocalReceivingRegion:
    """Implements ReceivingRegion over KVReceivers of this process, which it owns."""

    def __init__(self, region: KVRegion, receivers: Sequence[KVReceiver]) -> None:
        self._region = region
        self._receivers = {receiver.name: receiver for receiver in receivers}
        num_verifying = 1 if region.device is None else _VERIFYING_ON_DEVICE
        self._executor = ThreadPoolExecutor(num_verifying, "kv-verify")

    async def offers(self) -> tuple[TransportOffer, ...]:
        return tuple(receiver.offer() for receiver in self._receivers.values())

    def open_grant(self, grant: LaneGrant, opened: Callable[[OpenedGrant], None]) -> None:
        receiver, pairing = self._receivers[grant.transport], grant.pairing
        cells = pairing.at_destination(grant.held_tokens, grant.blocks, self._region.num_blocks)
        token = receiver.open_grant(grant.key, Landing(self._region, cells, pairing))
        opened(OpenedGrant(token=token, drain_proves_quiet=receiver.drain_proves_quiet))

    async def verify(self, transport: str, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        verify = partial(self._receivers[transport].verify, key, cells, checksum)
        return await asyncio.get_running_loop().run_in_executor(self._executor, verify)

    def revoke(self, transport: str, key: TransferKey) -> bool:
        return self._receivers[transport].revoke(key)

    def listen_quiet(self, on_quiet: Callable[[TransferKey], None]) -> None:
        for receiver in self._receivers.values():
            receiver.listen_quiet(on_quiet)

    def close(self) -> None:
        self._executor.shutdown()
        for receiver in self._receivers.values():
            receiver.close()


class LocalSendingRegion:
    """Implements SendingRegion over KVSenders of this process."""

    def __init__(self, region: KVRegion, senders: Sequence[KVSender], head_scales: Floats | None = None) -> None:
        self._layout = region.layout
        self._senders = senders
        self._head_scales = head_scales

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(sender.name for sender in self._senders)

    async def connect(self, request: LaneRequest) -> ConnectedLane:
        reasons = []
        for sender, offer in candidates(request.offers, self._senders):
            try:
                pairing = self._pair(sender, request)
                writer = await _Connecting(sender, offer, pairing).result()
            except TransferError as error:
                reasons.append(error.message)
                continue
            return ConnectedLane(transport=sender.name, wire_dtype=pairing.wire_dtype, writer=writer)
        raise TransferError("; ".join(["no KV transport in common", *reasons]))

    def _pair(self, sender: KVSender, request: LaneRequest) -> Pairing:
        """Choose the wire dtype. Raises TransferError when the peer requests one that this worker cannot produce."""
        here, there = self._layout, request.destination
        wire_dtype = choose_wire_dtype(here, there, wish=request.wire_dtype, one_sided=sender.one_sided)
        return Pairing.from_layouts(
            here, there, wire_dtype=wire_dtype, head_scales=self._head_scales, lane=request.lane
        )


class _Connecting:
    """A connection that a thread is making, which may take several seconds; one that nobody wants any more is closed.

    The thread closes it itself, because the event loop may have ended by then.
    """

    def __init__(self, sender: KVSender, offer: TransportOffer, pairing: Pairing) -> None:
        self._connect = partial(sender.connect, offer, pairing)
        self._lock = threading.Lock()
        self._is_wanted = True
        self._writer: PeerWriter | None = None

    async def result(self) -> PeerWriter:
        """Connect. Raises TransferError."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(None, self._run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(_ignore)
            with self._lock:
                self._is_wanted, writer = False, self._writer
            if writer is not None:
                loop.run_in_executor(None, writer.close)
            raise

    def _run(self) -> PeerWriter:
        if not self._is_wanted:
            raise TransferError("the link has ended")
        writer = self._connect()
        with self._lock:
            self._writer = writer
            is_wanted = self._is_wanted
        if not is_wanted:
            writer.close()
        return writer


def _ignore(ended: "asyncio.Future[PeerWriter]") -> None:
    """Note that a failure is of no interest any more."""
    if not ended.cancelled():
        ended.exception()
