"""From the configuration to a worker's place on the board."""

import time
from random import SystemRandom
from typing import TYPE_CHECKING

from tandem.board.breaker import CircuitBreaker
from tandem.board.entries import BoardCodec, Notice, Process
from tandem.board.publisher import BoardPublisher
from tandem.board.settings import board_settings
from tandem.worker_identity import WorkerIdentity

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config import RedisConfig


def make_publisher(config: "RedisConfig", secret: bytes, identity: WorkerIdentity) -> BoardPublisher | None:
    """A worker's publisher; None without Redis. Raises ConfigError when its client is not installed."""
    settings = board_settings(config)
    if settings is None:
        return None
    process = Process(identity.worker_id, identity.incarnation)
    return BoardPublisher(
        Notice(process=process, role=identity.role, address=identity.address),
        settings,
        BoardCodec(secret, settings.cluster),
        breaker=CircuitBreaker(SystemRandom()),
        clock=time.monotonic,
        wall_clock=time.time,
    )
