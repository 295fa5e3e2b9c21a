"""A worker's publishing to Redis while its cache changes all the time."""

import asyncio
from random import Random

from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import ClusterStateCodec, Notice, Process
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.redis_link import REDIS_BREAKER, LinkHealth
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.roles import WorkerRole
from worker.cluster_state.redis_publisher import ClusterStatePublisher

_SECRET = b"a secret of the test cluster"
_WRITE_S = 0.1


class BusyWorker:
    """A Redis that takes a tenth of a second for each write, and a worker whose cache has changed again by then."""

    def __init__(self, num_writes: int) -> None:
        self.health = LinkHealth(use="publish", is_up=True)
        self.now_s = 0.0
        self.renewed_s: list[float] = []
        self.written = asyncio.Event()
        self._left = num_writes
        self._sequence = 0
        self._publisher: ClusterStatePublisher | None = None

    def publisher(self) -> ClusterStatePublisher:
        notice = Notice(process=Process("w0", Incarnation(1)), role=WorkerRole.DECODE, address="w0:1")
        settings = RedisSettings(cluster="c")
        made = self._publisher = ClusterStatePublisher(
            notice,
            settings,
            ClusterStateCodec(_SECRET, settings.cluster),
            breaker=CircuitBreaker(REDIS_BREAKER, Random(1)),
            clock=lambda: self.now_s,
            wall_clock=lambda: 1e9 + self.now_s,
        )
        made._link = self  # type: ignore[assignment]
        made.send_snapshot(self._sequence, [])
        return made

    async def allowed(self) -> None: ...

    async def close(self) -> None: ...

    async def execute(self, commands: list, vital: int = 0) -> list:
        self.renewed_s += [self.now_s] * any(command[0] == "SET" for command in commands)
        return [None] * len(commands)

    async def transact(self, commands: list) -> None:
        await asyncio.sleep(0)
        self.now_s += _WRITE_S
        self._left -= 1
        if not self._left:
            self.written.set()
        elif self._left > 0 and self._publisher is not None:
            event = pb.KVEvent(block_hash=self._sequence.to_bytes(16, "big"), stored=True)
            assert self._publisher.send_events(self._sequence, [event])
            self._sequence += 1


async def test_lease_is_renewed_while_changes_never_end() -> None:
    worker = BusyWorker(num_writes=60)
    async with asyncio.timeout(10.0), worker.publisher():
        await worker.written.wait()
    lease_s = RedisSettings().lease_s
    gaps_s = [after - before for before, after in zip(worker.renewed_s, worker.renewed_s[1:], strict=False)]
    assert len(gaps_s) >= 4
    assert max(gaps_s) < lease_s / 2
