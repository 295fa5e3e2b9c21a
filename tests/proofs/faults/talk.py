"""The hand-off protocol over a gRPC channel on which messages get lost, doubled, overtaken, late, or which is cut."""

import asyncio
import random
from collections import deque
from typing import Any

import grpc.aio

from kv_transfer.session.link import LinkBroken
from tandem.v1 import handoff_pb2 as pb
from tandem.values.ids import TransferId
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.plan import Kind, Place


class HandoffMessages:
    """What the channels of one batch share."""

    def __init__(self, injector: Injector, long_stall_s: float) -> None:
        self.injector, self.long_stall_s = injector, long_stall_s
        self.history: dict[Place, deque[pb.HandoffMessage]] = {
            place: deque(maxlen=64) for place in (Place.ASKING, Place.TELLING)
        }
        self.nacks: set[str] = set()
        """Hand-offs of which something arrived damaged."""


class FaultyChannel:
    """As much of a grpc.aio channel as a ReceiverLink uses."""

    def __init__(self, inner: grpc.aio.Channel, messages: HandoffMessages) -> None:
        self._inner, self._messages = inner, messages

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """A callable that begins a stream."""
        begin = self._inner.stream_stream(*args, **options)
        return lambda **more: FaultyStream(begin(**more), self._messages)

    async def close(self) -> None:
        await self._inner.close()

    async def __aenter__(self) -> "FaultyChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inner.close()


class FaultyStream:
    """The decode worker's end of a stream: both directions pass here."""

    def __init__(self, inner: Any, messages: HandoffMessages) -> None:
        self._inner, self._messages = inner, messages
        self._ready: deque[pb.HandoffMessage] = deque()
        self._held: dict[Place, list[pb.HandoffMessage]] = {Place.ASKING: [], Place.TELLING: []}

    async def read(self) -> Any:
        """The next message that arrives."""
        while not self._ready:
            message = await self._inner.read()
            if message is grpc.aio.EOF:
                return message
            self._ready.extend(await self._passed(message, Place.TELLING))
        return self._ready.popleft()

    async def write(self, message: pb.HandoffMessage) -> None:
        """Send what becomes of it."""
        for passed in await self._passed(message, Place.ASKING):
            await self._inner.write(passed)

    async def _passed(self, message: pb.HandoffMessage, place: Place) -> list[pb.HandoffMessage]:
        messages, name = self._messages, message.transfer_id
        if message.WhichOneof("kind") == "nack":
            messages.nacks.add(name)
        hit = messages.injector.due(TransferId(name), place) if name else None
        if hit is None:
            passed = [message]
        else:
            passed = await self._faulty(message, hit[1].kind, place, random.Random(hit[1].seed))
        if passed and self._held[place]:
            for held in self._held[place]:
                messages.injector.suffered(TransferId(held.transfer_id), Kind.REORDER, place)
            passed, self._held[place] = [*passed, *self._held[place]], []
        if name:
            messages.history[place].append(message)
        return passed

    async def _faulty(
        self, message: pb.HandoffMessage, kind: Kind, place: Place, rng: random.Random
    ) -> list[pb.HandoffMessage]:
        messages = self._messages
        if kind is Kind.REORDER:
            self._held[place].append(message)
            return []
        messages.injector.suffered(TransferId(message.transfer_id), kind, place)
        match kind:
            case Kind.TRUNCATE:
                return []
            case Kind.REPLAY:
                sent = [*messages.history[place], message]
                return [message, message if rng.random() < 0.5 else rng.choice(sent)]
            case Kind.STALL:
                await asyncio.sleep(rng.uniform(0.002, 0.05) if rng.random() < 0.85 else messages.long_stall_s)
                return [message]
            case _:
                self._inner.cancel()
                raise LinkBroken("cut by a fault")
