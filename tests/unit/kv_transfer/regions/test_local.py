"""Connections of a region in this process that come too late to be wanted."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.regions.interface import LaneRequest
from kv_transfer.regions.local import LocalSendingRegion
from tests.support.kv_transfer.plain_worker import layout

KV = replace(layout(tp=2, heads=4, layers=3), num_regions=2)
REGION = KVRegion.from_buffer(memoryview(bytearray(4 * KV.region_block_bytes)), KV)
REQUEST = LaneRequest(
    lane=1, destination=KV, offers=(TransportOffer(name="slow", advert=b"", host_id=""),), wire_dtype=""
)
WAIT_S = 20.0


class SlowSender:
    """Connects when it is told to."""

    name, one_sided = "slow", False

    def __init__(self) -> None:
        self.began, self.may_end, self.closed = threading.Event(), threading.Event(), threading.Event()

    def reaches(self, _offer) -> bool:
        return True

    def connect(self, _offer, _pairing) -> SimpleNamespace:
        self.began.set()
        assert self.may_end.wait(WAIT_S)
        return SimpleNamespace(close=self.closed.set)


async def test_connection_made_after_its_link_has_ended_is_closed() -> None:
    sender = SlowSender()
    connecting = asyncio.ensure_future(LocalSendingRegion(REGION, (sender,)).connect(REQUEST))
    assert await asyncio.to_thread(sender.began.wait, WAIT_S)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    sender.may_end.set()
    assert await asyncio.to_thread(sender.closed.wait, WAIT_S)


def test_connection_made_after_its_event_loop_has_ended_is_closed() -> None:
    sender = SlowSender()

    async def give_up() -> None:
        connecting = asyncio.ensure_future(LocalSendingRegion(REGION, (sender,)).connect(REQUEST))
        assert await asyncio.to_thread(sender.began.wait, WAIT_S)
        connecting.cancel()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(give_up())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    sender.may_end.set()
    assert sender.closed.wait(WAIT_S)


async def test_connection_that_is_wanted_stays_open() -> None:
    sender = SlowSender()
    sender.may_end.set()
    made = await LocalSendingRegion(REGION, (sender,)).connect(REQUEST)
    assert made.transport == "slow"
    assert not sender.closed.is_set()
