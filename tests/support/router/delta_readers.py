"""Readers of requests for tests: what dispatch pushes, as a stream, or slowly."""

import asyncio
from collections.abc import AsyncGenerator

from router.types.requests import ChoiceDelta, DeltaSink, Generator, RoutedRequest


class SlowReader(DeltaSink):
    """Has room for one delta at a time, and for the next when the test says so."""

    def __init__(self) -> None:
        self.taken: list[ChoiceDelta] = []
        self.room = asyncio.Event()
        self.waiting = asyncio.Event()

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self.taken.append(delta)
        return True

    async def ready(self) -> None:
        self.waiting.set()
        await self.room.wait()


class QuickReader(DeltaSink):
    """A reader that accepts every delta at once."""

    def __init__(self) -> None:
        self.taken: list[ChoiceDelta] = []
        self.arrived: asyncio.Queue[ChoiceDelta | None] = asyncio.Queue()

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self.taken.append(delta)
        self.arrived.put_nowait(delta)
        return False

    async def ready(self) -> None:
        raise AssertionError("was never slow")

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token.token_id for delta in self.taken if delta.choice_index == choice for token in delta.tokens]


async def pushed(generator: Generator, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
    """As `generator.generate`, by way of `run`."""
    reader = QuickReader()
    task = asyncio.create_task(generator.run(request, reader))
    task.add_done_callback(lambda _: reader.arrived.put_nowait(None))
    try:
        while (delta := await reader.arrived.get()) is not None:
            yield delta
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
