"""A server at Redis's address that speaks its protocol with invalid content: the follower waits, and recovers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from router.cluster_state.redis_log_follower import CacheLogFollower, ClusterStateCounts
from router.types.worker_view import WorkerKey
from router.workers.log_positions import LogPositions
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import CacheState, ClusterStateCodec
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.redis_link import RedisLink
from tandem.values.ids import Incarnation, WorkerId
from tests.support.redis_cluster import QUICK
from tests.support.redis_server import until

NOTHING = b"*-1\r\n"
LARGE = 256 << 20


class Liar:
    """Sends the same answer to every XREAD, and OK to all else."""

    def __init__(self, reply: bytes) -> None:
        self.canned_reply = reply
        self.num_readings = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                parts = [await self._part(reader) for _ in range(int(head[1:]))]
                is_reading = parts[0] == b"XREAD"
                self.num_readings += is_reading
                writer.write(self.canned_reply if is_reading else b"+OK\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    @staticmethod
    async def _part(reader: asyncio.StreamReader) -> bytes:
        length = int((await reader.readline())[1:])
        return (await reader.readexactly(length + 2))[:length]


@asynccontextmanager
async def following(liar: Liar) -> AsyncIterator[RedisLink]:
    """A follower that has already read a worker's state."""
    server = await asyncio.start_server(liar.serve, "127.0.0.1", 0)
    settings = RedisSettings(host="127.0.0.1", port=server.sockets[0].getsockname()[1], timeout_s=5.0)
    link = RedisLink(settings, CircuitBreaker(QUICK, Random(1)), use="follow", clock=time.monotonic)
    view, key = LogPositions(), WorkerKey(WorkerId("d0"), Incarnation(1))
    view.follow(key)
    list(view.load(key, CacheState(next_sequence=1, names=b""), 0.0))
    follower = CacheLogFollower(
        view,
        link,
        ClusterStateCodec(b"secret", "c"),
        ClusterStateKeys("c"),
        counts=ClusterStateCounts(),
        apply=lambda *_: None,
        clock=time.monotonic,
    )
    async with server, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(follower.run())
        yield link
        running.cancel()
        await asyncio.wait([running])
        await link.close()


@pytest.mark.parametrize(
    "reply",
    [
        b":5\r\n",
        b"$1\r\nx\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"*1\r\n*2\r\n$1\r\nk\r\n*-1\r\n",
        b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*1\r\n$3\r\n1-0\r\n",
        b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$2\r\n\xff\xff\r\n*-1\r\n",
        b"*1\r\n*2\r\n*0\r\n*0\r\n",
        b"*1\r\n" * 20_000,
        b"-LOADING Redis is loading the dataset in memory\r\n",
    ],
    ids=[
        "number",
        "text",
        "bare log",
        "no entries",
        "bare id",
        "no id",
        "log that is a list",
        "lists within lists",
        "LOADING",
    ],
)
async def test_log_follower_malformed_reply_is_ignored(reply: bytes) -> None:
    liar = Liar(reply)
    async with following(liar) as link:
        await until(lambda: link.health.failures > QUICK.most_in_a_row, "it waits and tries again")
        assert not link.health.is_up
        liar.canned_reply = NOTHING
        await until(lambda: link.health.is_up, "Redis is back")
        so_far = liar.num_readings
        await until(lambda: liar.num_readings > so_far, "it reads on")


class Flooding(Liar):
    """Sends an entry without end."""

    def __init__(self) -> None:
        super().__init__(b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\ne\r\n$%d\r\n" % LARGE)
        self.num_bytes = 0
        self.num_ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        so_far = self.num_readings
        talking = asyncio.ensure_future(super().serve(reader, writer))
        await until(lambda: self.num_readings > so_far, "it is asked for entries")
        try:
            for _ in range(LARGE >> 16):
                writer.write(bytes(1 << 16))
                await writer.drain()
                self.num_bytes += 1 << 16
        except ConnectionError:
            self.num_ended += 1
        finally:
            await asyncio.gather(talking, return_exceptions=True)


async def test_redis_link_oversized_reply_is_not_read() -> None:
    liar = Flooding()
    async with following(liar) as link:
        await until(lambda: liar.num_ended > 0, "the connection was thrown away")
        # What the kernel holds between two processes was sent, and no more.
        assert liar.num_bytes < LARGE // 4
        assert "a reply is larger than" in link.health.reason
