"""A link whose connections for bytes cannot all be made, or that ends meanwhile: none of them stays open."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.protocol.messages import Hello
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.regions.interface import ConnectedLane, LaneRequest
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_link import make_hello
from kv_transfer.session.sender_link import SenderLink
from tandem.errors import TransferError
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout

WAIT_S = 20.0
LAYOUT = KVLayout(
    model_fingerprint="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    tp_size=2,
    num_regions=2,
)
LOCAL = LocalWorker(worker_id=WorkerId("w"), incarnation=Incarnation(1), layout=LAYOUT, num_blocks=8)


class Writer:
    def __init__(self) -> None:
        self.closed_once = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Called on another thread."""
        self._loop.call_soon_threadsafe(self.closed_once.set)


class Region:
    """Connects when `ready` has ended; without a writer it cannot."""

    transports = ("memory",)

    def __init__(self, writer: Writer | None, ready: Callable[[], Awaitable[object]]) -> None:
        self.writer, self.ready = writer, ready
        self.asked = asyncio.Event()

    async def connect(self, _request: LaneRequest) -> ConnectedLane:
        self.asked.set()
        await self.ready()
        if self.writer is None:
            raise TransferError("nobody listens")
        return ConnectedLane(transport="memory", wire_dtype="float32", writer=self.writer)  # type: ignore[arg-type]


def connecting(*regions: Region) -> "asyncio.Task[list[ConnectedLane]]":
    link = SenderLink(None, local=LOCAL, regions=regions, settings=TransferSettings())
    theirs: Hello = make_hello(LOCAL, (), more_regions=((),))
    return asyncio.create_task(link._connect_lanes(theirs, "float32"))


async def at_once() -> None: ...


async def test_link_without_one_of_its_connections_closes_the_other() -> None:
    writer = Writer()
    with pytest.raises(TransferError, match="nobody listens"):
        await connecting(Region(writer, at_once), Region(None, at_once))
    await asyncio.wait_for(writer.closed_once.wait(), WAIT_S)


async def test_link_cancelled_before_a_thread_is_free_closes_its_connection_all_the_same() -> None:
    """The one thread closes it later; what waits for that thread must not be cancelled with the link."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    go = threading.Event()
    busy = asyncio.get_running_loop().run_in_executor(None, go.wait, WAIT_S)
    writer = Writer()
    link = connecting(Region(writer, at_once), Region(None, at_once))
    for _ in range(20):
        await asyncio.sleep(0)
    link.cancel()
    with pytest.raises(asyncio.CancelledError):
        await link
    assert not writer.closed_once.is_set()
    go.set()
    await asyncio.wait_for(writer.closed_once.wait(), WAIT_S)
    await busy


async def test_link_cancelled_while_a_connection_is_made_closes_the_one_that_is() -> None:
    writer, never = Writer(), asyncio.Event()
    slow = Region(None, never.wait)
    link = connecting(Region(writer, at_once), slow)
    await slow.asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    link.cancel()
    with pytest.raises(asyncio.CancelledError):
        await link
    await asyncio.wait_for(writer.closed_once.wait(), WAIT_S)
