"""The decode worker's end of the link to one prefill worker: connects, and reconnects for as long as it is needed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.layout.lanes import lanes_between
from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol import wire
from kv_transfer.protocol.messages import Body, HandoffEnvelope, Hello, PrefillJob, Reject, TransferKey, TransportOffer
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.versions import ADAPTERS, SPOKEN, handoff_dialect, spoken_with
from kv_transfer.protocol.wire import WireError
from kv_transfer.session.link import LinkBroken, LinkOutbox, exchange_messages, read_message, write_message
from kv_transfer.session.peer import LocalWorker
from tandem.errors import ConfigError, InvariantError, TransferError
from tandem.protocol.version_negotiation import NoCommonVersion
from tandem.v1.handoff_pb2_grpc import HandoffStub
from tandem.values.ids import Incarnation
from tandem.values.kv_agreement import agree

_MIN_BACKOFF_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Opens a channel to a peer's address; `metadata` proves that this worker belongs to the cluster."""

    open_channel: Callable[[str], Any]
    """Returns the context of a grpc.aio channel (tandem.rpc.cluster_grpc.ClusterChannels). Entering it raises
    ConfigError where this worker must not connect."""
    metadata: Sequence[tuple[str, str]] = ()


class LinkUser(Protocol):
    """Callbacks of the hub that uses the links."""

    def link_up(self, link: "ReceiverLink") -> None:
        """Called once HELLOs were exchanged; the link's `peer` and `transport` are then known."""

    def link_down(self, link: "ReceiverLink", reason: str) -> None:
        """Called when the link ended or could not be established."""

    def link_needed(self, link: "ReceiverLink") -> bool:
        """Whether some hand-off still uses this link."""

    def deliver(self, link: "ReceiverLink", envelope: HandoffEnvelope) -> None: ...

    def on_malformed(self, link: "ReceiverLink", key: TransferKey | None, reason: str) -> None:
        """Called with a malformed message; `key` is the attempt it names, if it could be read."""


class ReceiverLink:
    """Link to one prefill worker; `run` is its whole life and ends when it is closed, or unused and unreachable."""

    def __init__(
        self,
        address: str,
        *,
        local: LocalWorker,
        make_hello: Callable[[], Awaitable[Hello]],
        dialer: Dialer,
        user: LinkUser,
        settings: TransferSettings,
    ) -> None:
        self.address = address
        self.peer: Incarnation | None = None
        """Incarnation of the prefill worker; None while the link is down."""
        self.transports: tuple[str, ...] = ()
        """The transport that the peer writes through, for each lane."""
        self._pairings: tuple[Pairing, ...] = ()
        self._local = local
        self._make_hello = make_hello
        """Called for each connection, since adverts change when certificates are renewed."""
        self._dialer = dialer
        self._user = user
        self._settings = settings
        self._outbox = LinkOutbox()
        self._wake = asyncio.Event()
        self._closing = False

    @property
    def transport(self) -> str:
        """The transport that the peer writes through; where lanes differ, all of them."""
        return joined_names(self.transports)

    def can_carry(self, job: PrefillJob) -> bool:
        """Whether the peer knows all that the job asks for; only while the link is up."""
        return job.adapter is None or self._outbox.dialect.version >= ADAPTERS

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        """The agreed layouts and wire dtype for each lane, from when the link last came up."""
        if not self._pairings:
            raise InvariantError("the link was never up")
        return self._pairings

    def send(self, key: TransferKey | None, body: Body) -> None:
        """Send a message; dropped while the link is down, because the hand-offs on it have then failed."""
        if self.peer is not None:
            self._outbox.enqueue(
                HandoffEnvelope(incarnation=self._local.incarnation, addressee=self.peer, key=key, body=body)
            )

    def dial_now(self) -> None:
        """Dial now, cutting the backoff short."""
        self._wake.set()

    def close(self) -> None:
        """Send what is queued and end."""
        self._closing = True
        self._outbox.close()
        self._wake.set()

    async def run(self) -> None:
        """Dial until closed, or until unused and unreachable for `forget_s`."""
        loop = asyncio.get_running_loop()
        backoff_s = _MIN_BACKOFF_S
        last_up = loop.time()
        while not self._closing:
            self._wake.clear()
            reason, was_up = await self._session()
            if was_up:
                backoff_s, last_up = _MIN_BACKOFF_S, loop.time()
            self._user.link_down(self, reason)
            if not self._user.link_needed(self) and loop.time() - last_up > self._settings.forget_s:
                return
            if not self._closing:
                await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, self._settings.max_backoff_s)

    async def _pause(self, backoff_s: float) -> None:
        await asyncio.sleep(_MIN_BACKOFF_S)
        try:
            async with asyncio.timeout(backoff_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _session(self) -> tuple[str, bool]:
        """Run one connection to its end; returns why it ended, and whether it was ever up."""
        self._outbox = LinkOutbox()
        if self._closing:
            self._outbox.close()
        was_up = False
        try:
            async with self._dialer.open_channel(self.address) as channel:
                stub = HandoffStub(channel)  # type: ignore[no-untyped-call]
                stream = stub.Connect(metadata=tuple(self._dialer.metadata))
                await self._handshake(stream)
                was_up = True
                self._user.link_up(self)
                await exchange_messages(
                    stream,
                    self._outbox,
                    deliver=lambda envelope: self._user.deliver(self, envelope),
                    on_malformed=lambda key, reason: self._user.on_malformed(self, key, reason),
                )
        except (LinkBroken, ConfigError) as error:
            return f"link to {self.address}: {error}", was_up
        finally:
            self.peer = None
        return "closed", was_up

    async def _handshake(self, stream: Any) -> None:
        try:
            async with asyncio.timeout(self._settings.connect_s):
                mine = await self._make_hello()
                hello = HandoffEnvelope(
                    incarnation=self._local.incarnation, addressee=Incarnation(0), key=None, body=mine
                )
                await write_message(stream, hello)
                answer = wire.decode(await read_message(stream))
        except TimeoutError:
            raise LinkBroken("no answer to HELLO") from None
        except WireError as error:
            raise LinkBroken(f"bad HELLO: {error}") from None
        body = answer.body
        if isinstance(body, Reject):
            raise LinkBroken(f"refused: {body.failure.message}")
        if not isinstance(body, Hello):
            raise LinkBroken("no HELLO")
        if answer.addressee != self._local.incarnation:
            raise LinkBroken("the answer to HELLO is addressed to another process")
        if refusal := refuses(source=body, destination=mine):
            raise LinkBroken(f"rejected by this worker: {refusal}")
        lanes = lanes_between(body.layout, self._local.layout)
        try:
            pairings = tuple(
                Pairing.from_layouts(
                    body.layout,
                    self._local.layout,
                    wire_dtype=body.wire_dtype,
                    head_scales=self._local.head_scales,
                    lane=number,
                )
                for number in range(len(lanes))
            )
        except TransferError as error:
            raise LinkBroken(f"rejected by this worker: {error.message}") from None
        regions = (mine.transports, *mine.more_regions)
        if len(body.transports) != len(lanes):
            raise LinkBroken(f"{len(body.transports)} transports for {len(lanes)} lanes")
        for lane, chosen in zip(lanes, body.transports, strict=True):
            if chosen.name not in {offer.name for offer in regions[lane.destination]}:
                raise LinkBroken("no transport in common")
        self._outbox.dialect = handoff_dialect(SPOKEN.negotiate(body.versions))
        self._pairings = pairings
        self.peer, self.transports = answer.incarnation, tuple(offer.name for offer in body.transports)


def joined_names(transports: Sequence[str]) -> str:
    """The name under which a link's transport is counted: each that some lane uses, once."""
    return "+".join(dict.fromkeys(transports))


def refuses(*, source: Hello, destination: Hello) -> str | None:
    """Reason why the two workers must not be paired, naming the field; None when they may."""
    try:
        source.versions.negotiate(destination.versions)
    except NoCommonVersion:
        return f"protocol_version: {source.versions} at the source, {destination.versions} at the destination"
    return agree(source.layout, destination.layout)


def make_hello(
    local: LocalWorker,
    offers: Sequence[TransportOffer],
    *,
    wire_dtype: str = "",
    more_regions: Sequence[Sequence[TransportOffer]] = (),
) -> Hello:
    return Hello(
        versions=spoken_with(local.layout.num_regions, has_groups=bool(local.layout.windowed_layers)),
        worker_id=local.worker_id,
        layout=local.layout,
        transports=tuple(offers),
        wire_dtype=wire_dtype,
        more_regions=tuple(map(tuple, more_regions)),
    )
