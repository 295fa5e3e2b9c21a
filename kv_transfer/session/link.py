"""Common parts of both ends of a link: a bounded outbox, and the loops that read and write messages."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from kv_transfer.protocol import wire
from kv_transfer.protocol.messages import Body, HandoffEnvelope, Renew, TransferKey
from kv_transfer.protocol.versions import SPOKEN, handoff_dialect
from kv_transfer.protocol.wire import MAX_RENEWALS, WireError
from tandem.v1 import handoff_pb2 as pb

MAX_QUEUED = 16384


class LinkBroken(Exception):
    """The link has ended; the message says why."""


class LinkOutbox:
    """Outgoing messages of a link; the link ends when the peer does not read them."""

    def __init__(self) -> None:
        self.dialect = handoff_dialect(SPOKEN.newest)
        """Kinds of message that may be sent; fixed by the version once HELLOs were exchanged."""
        self._queue: deque[HandoffEnvelope] = deque()
        self._wake = asyncio.Event()
        self.closed = False

    def enqueue(self, envelope: HandoffEnvelope) -> None:
        """Queue a message, unless the peer is too old to know its kind; on overflow the link ends instead."""
        if not self.dialect.has(wire.kind_of(envelope.body)):
            return
        if len(self._queue) >= MAX_QUEUED:
            self.close()
        if not self.closed:
            self._queue.append(envelope)
            self._wake.set()

    def close(self) -> None:
        """Send what is queued, then end the link."""
        self.closed = True
        self._wake.set()

    async def get(self) -> HandoffEnvelope | None:
        """The next message; None once closed and empty."""
        while not self._queue:
            if self.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()


async def exchange_messages(
    stream: Any,
    outbox: LinkOutbox,
    *,
    deliver: Callable[[HandoffEnvelope], None],
    on_malformed: Callable[[TransferKey | None, str], None],
) -> None:
    """Exchange messages over a gRPC stream until one direction ends; always raises.

    A message that is malformed goes to `on_malformed` and harms no other hand-off. Raises LinkBroken, or any error that
    `deliver` raised.
    """
    tasks = [
        asyncio.create_task(_read(stream, deliver, on_malformed)),
        asyncio.create_task(_write(stream, outbox)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    reason = "closed"
    for result in results:
        if isinstance(result, LinkBroken):
            reason = str(result)
        elif isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    raise LinkBroken(reason)


async def _read(
    stream: Any, deliver: Callable[[HandoffEnvelope], None], on_malformed: Callable[[TransferKey | None, str], None]
) -> None:
    while True:
        message = await read_message(stream)
        try:
            envelope = wire.decode(message)
        except WireError as error:
            on_malformed(error.key, str(error))
            continue
        deliver(envelope)


async def _write(stream: Any, outbox: LinkOutbox) -> None:
    while (envelope := await outbox.get()) is not None:
        await write_message(stream, envelope)
    raise LinkBroken("closed by this side")


async def read_message(stream: Any) -> pb.HandoffMessage:
    """Read one raw message. Raises LinkBroken."""
    message = await _guarded(stream.read())
    if message is grpc.aio.EOF:
        raise LinkBroken("closed by the peer")
    if not isinstance(message, pb.HandoffMessage):
        raise LinkBroken("not a hand-off message")
    return message


async def write_message(stream: Any, envelope: HandoffEnvelope) -> None:
    """Send one message. Raises LinkBroken."""
    await _guarded(stream.write(wire.encode(envelope)))


async def _guarded(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise LinkBroken(f"{error.code().name}: {error.details()}") from None
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        raise LinkBroken(f"stream ended: {error}") from None


def renewals(keys: Iterable[TransferKey]) -> Iterable[Body]:
    """Build RENEW messages for these hand-offs, each within the wire's bound."""
    ids = [key.transfer_id for key in keys]
    for start in range(0, len(ids), MAX_RENEWALS):
        yield Renew(transfer_ids=tuple(ids[start : start + MAX_RENEWALS]))
