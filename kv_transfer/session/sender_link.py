"""The prefill worker's end of the link to one decode worker: HELLO, a connection for KV bytes, then messages."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kv_transfer.layout.pairing import Pairing, choose_wire_dtype
from kv_transfer.protocol import wire
from kv_transfer.protocol.messages import Body, Failure, HandoffEnvelope, Hello, Reject, TransferKey, TransportOffer
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.versions import SPOKEN, handoff_dialect
from kv_transfer.protocol.wire import WireError
from kv_transfer.session.link import LinkBroken, LinkOutbox, exchange_messages, read_message, write_message
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_link import make_hello, refuses
from kv_transfer.transports.catalogue import candidates
from kv_transfer.transports.interface import KVSender, PeerWriter
from tandem.errors import InvariantError, TransferError
from tandem.values.ids import Incarnation

log = logging.getLogger(__name__)


class SenderLink:
    """One stream. The byte connection is made before HELLO is answered, so that a pair that cannot work is refused at
    once."""

    def __init__(
        self, stream: Any, *, local: LocalWorker, senders: Sequence[KVSender], settings: TransferSettings
    ) -> None:
        self.peer = Incarnation(0)
        """Incarnation of the decode worker; known once the link is up."""
        self.transport = ""
        self._stream = stream
        self._local = local
        self._senders = senders
        self._settings = settings
        self._outbox = LinkOutbox()
        self._writer: PeerWriter | None = None
        self._pairing: Pairing | None = None
        self._ended = False

    @property
    def connected(self) -> bool:
        """Whether there is a byte connection."""
        return self._writer is not None

    @property
    def writer(self) -> PeerWriter:
        if self._writer is None:
            raise InvariantError("link has no byte connection yet")
        return self._writer

    @property
    def pairing(self) -> Pairing:
        """The layouts and wire dtype agreed with the peer."""
        if self._pairing is None:
            raise InvariantError("link has no pairing yet")
        return self._pairing

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
        finally:
            self._ended = True

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
        reasons = []
        for sender, offer in candidates(theirs.transports, self._senders):
            try:
                pairing = self._pair(sender, theirs)
                await asyncio.to_thread(self._connect, sender, offer, pairing)
            except TransferError as error:
                reasons.append(error.message)
                continue
            self.transport, self._pairing = sender.name, pairing
            chosen = replace(offer, advert=b"")
            return self._envelope(None, replace(mine, transports=(chosen,), wire_dtype=pairing.wire_dtype))
        return self._refuse("; ".join(["no KV transport in common", *reasons]))

    def _pair(self, sender: KVSender, theirs: Hello) -> Pairing:
        """Choose the wire dtype. Raises TransferError when the peer requests one that this worker cannot produce."""
        here, there = self._local.layout, theirs.layout
        wire_dtype = choose_wire_dtype(here, there, wish=theirs.wire_dtype, one_sided=sender.one_sided)
        return Pairing.from_layouts(here, there, wire_dtype=wire_dtype, head_scales=self._local.head_scales)

    def _connect(self, sender: KVSender, offer: TransportOffer, pairing: Pairing) -> None:
        """Connect. Runs on a thread that outlives a cancelled link and then closes the connection itself."""
        self._writer = sender.connect(offer, pairing)
        if self._ended:
            self._writer.close()

    def _refuse(self, reason: str) -> HandoffEnvelope:
        return self._envelope(None, Reject(failure=Failure(kind=TransferError, message=reason)))

    def _envelope(self, key: TransferKey | None, body: Body) -> HandoffEnvelope:
        return HandoffEnvelope(incarnation=self._local.incarnation, addressee=self.peer, key=key, body=body)
