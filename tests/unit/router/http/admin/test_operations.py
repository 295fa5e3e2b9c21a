"""An admin page under many concurrent requests."""

import asyncio

import pytest

from router.http.admin.operations import SharedScrape
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of


class Reader:
    """Counts its readings; each waits until it may end."""

    def __init__(self):
        self.num = 0
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def read(self):
        self.num += 1
        num = self.num
        self.began.set()
        await self.may_end.wait()
        if num == 2:
            raise ValueError("spoilt")
        return str(num).encode()


async def test_shared_scrape_concurrent_callers_share_one_reading():
    reader = Reader()
    reader.may_end.set()
    shared = SharedScrape(reader.read)
    assert await asyncio.gather(*(shared() for _ in range(50))) == [b"1"] * 50
    assert reader.num == 1


async def test_shared_scrape_during_reading_shares_the_next():
    reader = Reader()
    shared = SharedScrape(reader.read)
    first = asyncio.create_task(shared())
    await reader.began.wait()
    later = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    later.pop(0).cancel()
    reader.may_end.set()
    assert await first == b"1"
    for one in later:
        with pytest.raises(ValueError, match="spoilt"):
            await one
    assert await shared() == b"3"


async def test_metrics_concurrent_scrapes_share_one_reading():
    parts, readings = fakes.make_servers(fakes.make_tokenizer()), []

    async def read():
        readings.append(1)
        return b"page"

    parts.metrics.collect_with(read)
    async with client_of(parts) as client:
        pages = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
    assert {page.content for page in pages} == {b"page"}
    assert len(readings) == 1
