"""The prefill worker's end of the link to one decode worker: HELLO, a connection for KV bytes, then messages."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kv_transfer.layout.lanes import lanes_between
from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol import wire
from kv_transfer.protocol.messages import Body, Failure, HandoffEnvelope, Hello, Reject, TransferKey, TransportOffer
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.versions import SPOKEN, handoff_dialect
from kv_transfer.protocol.wire import WireError
from kv_transfer.regions.interface import ConnectedLane, LaneRequest, SendingRegion
from kv_transfer.session.link import LinkBroken, LinkOutbox, exchange_messages, read_message, write_message
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_link import joined_names, make_hello, refuses
from kv_transfer.transports.catalogue import reaches_device
from kv_transfer.transports.interface import PeerWriter
from tandem.errors import InvariantError, TransferError
from tandem.values.ids import Incarnation

log = logging.getLogger(__name__)
_CONNECT_LANES_S = 60.0
"""Bound for what no transport bounds: a rank that is frozen."""


class SenderLink:
    """One stream. The byte connection is made before HELLO is answered, so that a pair that cannot work is refused at
    once."""

    def __init__(
        self, stream: Any, *, local: LocalWorker, regions: Sequence[SendingRegion], settings: TransferSettings
    ) -> None:
        self.peer = Incarnation(0)
        """Incarnation of the decode worker; known once the link is up."""
        self.transports: tuple[str, ...] = ()
        """The transport of each lane."""
        self.to_device = False
        """Whether the peer's pool is known to be on a device."""
        self._stream = stream
        self._local = local
        self._regions = regions
        self._settings = settings
        self._outbox = LinkOutbox()
        self._writers: tuple[PeerWriter, ...] = ()
        self._pairings: tuple[Pairing, ...] = ()

    @property
    def writers(self) -> tuple[PeerWriter, ...]:
        """The byte connection of each lane; none before the link is up."""
        return self._writers

    @property
    def transport(self) -> str:
        """The transport that bytes are written through; where lanes differ, all of them."""
        return joined_names(self.transports)

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        """The layouts and wire dtype agreed with the peer, for each lane."""
        if not self._pairings:
            raise InvariantError("link has no pairing yet")
        return self._pairings

    def send(self, key: TransferKey | None, body: Body) -> None:
        """Queue a message; dropped once the link ends."""
        self._outbox.enqueue(self._envelope(key, body))

    def close(self) -> None:
        """Send what is queued, then end the link."""
        self._outbox.close()

    async def run(
        self,
        *,
        deliver: Callable[[HandoffEnvelope], None],
        on_malformed: Callable[[TransferKey | None, str], None],
    ) -> None:
        """Run the link from start to end."""
        try:
            greeting = await self._handshake()
            await write_message(self._stream, greeting)
            if isinstance(greeting.body, Hello):
                await exchange_messages(self._stream, self._outbox, deliver=deliver, on_malformed=on_malformed)
        except (LinkBroken, WireError) as error:
            log.info("link ended: %s", error)
        except TimeoutError:
            log.info("link ended: no HELLO in time")

    async def _handshake(self) -> HandoffEnvelope:
        """Answer the peer's HELLO, after connecting for bytes."""
        async with asyncio.timeout(self._settings.connect_s):
            envelope = wire.decode(await read_message(self._stream))
        theirs = envelope.body
        self.peer = envelope.incarnation
        if not isinstance(theirs, Hello):
            return self._refuse("no HELLO")
        mine = make_hello(self._local, ())
        if refusal := refuses(source=mine, destination=theirs):
            return self._refuse(refusal)
        self._outbox.dialect = handoff_dialect(SPOKEN.negotiate(theirs.versions))
        if 1 + len(theirs.more_regions) != theirs.layout.num_regions:
            return self._refuse(
                f"transports of {1 + len(theirs.more_regions)} regions, not {theirs.layout.num_regions}"
            )
        if len(theirs.transports) > wire.MAX_TRANSPORTS:
            return self._refuse(f"{len(theirs.transports)} transports, at most {wire.MAX_TRANSPORTS} are read")
        try:
            async with asyncio.timeout(_CONNECT_LANES_S):
                lanes = await self._connect(theirs)
        except TransferError as error:
            return self._refuse(error.message)
        except TimeoutError:
            return self._refuse(f"KV connections were not made within {_CONNECT_LANES_S:g} s")
        chosen = tuple(TransportOffer(name=lane.transport, advert=b"", host_id="") for lane in lanes)
        return self._envelope(None, replace(mine, transports=chosen, wire_dtype=lanes[0].wire_dtype))

    async def _connect(self, theirs: Hello) -> list[ConnectedLane]:
        """Connect every lane, and none when one of them cannot be. Raises TransferError."""
        layouts = self._local.layout, theirs.layout
        connected = await self._connect_lanes(theirs, theirs.wire_dtype)
        if len({lane.wire_dtype for lane in connected}) > 1:
            # Some transport can only use the dtype in which the peer stores KV; then all use it.
            await _closed(connected)
            connected = await self._connect_lanes(theirs, theirs.layout.dtype)
        self._writers = tuple(lane.writer for lane in connected)
        self.transports = tuple(lane.transport for lane in connected)
        self.to_device = reaches_device(theirs.transports)
        self._pairings = tuple(
            Pairing.from_layouts(*layouts, wire_dtype=lane.wire_dtype, head_scales=self._local.head_scales, lane=number)
            for number, lane in enumerate(connected)
        )
        return connected

    async def _connect_lanes(self, theirs: Hello, wire_dtype: str) -> list[ConnectedLane]:
        regions = (theirs.transports, *theirs.more_regions)
        connecting = [
            asyncio.ensure_future(
                self._regions[lane.source].connect(
                    LaneRequest(
                        lane=number,
                        destination=theirs.layout,
                        offers=regions[lane.destination],
                        wire_dtype=wire_dtype,
                    )
                )
            )
            for number, lane in enumerate(lanes_between(self._local.layout, theirs.layout))
        ]
        results: list[ConnectedLane | BaseException] = []
        try:
            results = await asyncio.gather(*connecting, return_exceptions=True)
        except asyncio.CancelledError:
            # Those under way are cancelled, too, and close what they make.
            _closed([one.result() for one in connecting if _is_made(one)])
            raise
        errors = [result for result in results if isinstance(result, BaseException)]
        connected = [result for result in results if not isinstance(result, BaseException)]
        if errors:
            await _closed(connected)
            raise errors[0]
        return connected

    def close_writers(self) -> None:
        """Close the byte connections; blocks until their threads have ended."""
        _close_all(self._writers)

    def _refuse(self, reason: str) -> HandoffEnvelope:
        return self._envelope(None, Reject(failure=Failure(kind=TransferError, message=reason)))

    def _envelope(self, key: TransferKey | None, body: Body) -> HandoffEnvelope:
        return HandoffEnvelope(incarnation=self._local.incarnation, addressee=self.peer, key=key, body=body)


def _closed(lanes: Sequence[ConnectedLane]) -> "asyncio.Future[None]":
    """Close them on another thread. Awaiting the future may be cancelled, also before such a thread is free, and they
    are closed all the same."""
    closing = asyncio.get_running_loop().run_in_executor(None, _close_all, [lane.writer for lane in lanes])
    return asyncio.shield(closing)


def _close_all(writers: Sequence[PeerWriter]) -> None:
    """Close connections at the same time: each may wait for a peer that stalls."""
    threads = [threading.Thread(target=writer.close, name="kv-close", daemon=True) for writer in writers[1:]]
    for thread in threads:
        thread.start()
    for writer in writers[:1]:
        writer.close()
    for thread in threads:
        thread.join()


def _is_made(connecting: "asyncio.Future[ConnectedLane]") -> bool:
    return connecting.done() and not connecting.cancelled() and connecting.exception() is None
