"""From the configuration to a worker's place on the board."""

import time
from contextlib import AsyncExitStack
from random import SystemRandom
from typing import TYPE_CHECKING, Protocol

from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import ClusterStateCodec, Notice, Process
from tandem.rpc.redis_link import REDIS_BREAKER
from tandem.values.worker_identity import WorkerIdentity
from worker.cluster_state.publisher import BoardPublisher
from worker.session_port import EventSink

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config.redis import RedisConfig


class SnapshotSource(Protocol):
    """Who knows the whole cache (`EngineHost`)."""

    def send_snapshot(self, sink: EventSink) -> None:
        """Call `sink.send_snapshot` soon, in order with the events."""
        ...


async def publish(stack: AsyncExitStack, publisher: BoardPublisher | None, source: SnapshotSource) -> None:
    """Put the worker on the board, until `stack` is left; no-op without Redis."""
    if publisher is not None:
        source.send_snapshot(publisher)
        await stack.enter_async_context(publisher)


def make_publisher(config: "RedisConfig", secret: bytes, identity: WorkerIdentity) -> BoardPublisher | None:
    """A worker's publisher; None without Redis. Raises ConfigError when its client is not installed."""
    settings = config.redis_settings()
    if settings is None:
        return None
    process = Process(identity.worker_id, identity.incarnation)
    return BoardPublisher(
        Notice(process=process, role=identity.role, address=identity.address),
        settings,
        ClusterStateCodec(secret, settings.cluster),
        breaker=CircuitBreaker(REDIS_BREAKER, SystemRandom()),
        clock=time.monotonic,
        wall_clock=time.time,
    )
