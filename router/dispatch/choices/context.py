"""State shared by all requests of one router, and what a choice without a worker can wait for."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from router.dispatch.choices.hedging import Hedging
from router.dispatch.choices.observer import DispatchObserver
from router.dispatch.choices.retry import RetryBudget
from router.dispatch.choices.waiting_choices import WaitingChoices
from router.placement.placer import Placer
from router.types.session_events import AttemptReader
from router.workers.health import WorkerHealth
from tandem.values.block_hash import BlockHasher

NewReader = Callable[[int, int], AttemptReader]
"""Makes the reader of an attempt, from its choice's index and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgingSettings:
    quantile: float = 0.95
    budget: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Bounds of one request."""

    max_attempts: int = 4
    """Consecutive attempts without a new token."""
    stream_buffer_tokens: int = 4096
    """Per choice: tokens waiting for a slow reader before the request is cancelled."""
    rejoin_s: float = 60.0
    """Time for which a stream whose worker died waits for one to join when none is left; see `router.rejoin_s`."""
    max_queue_s: float = 60.0
    """Time for which a request that no worker has accepted waits for an expected one; see `router.max_queue_s`."""
    retry_after_s: float = 1.0
    """Retry-After for clients when no worker gave one."""
    hedging: HedgingSettings | None = None
    """Hedging of late first tokens; None: off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchContext:
    """State shared by all requests of one router."""

    placer: Placer
    hasher: BlockHasher
    budget: RetryBudget
    observer: DispatchObserver
    clock: Callable[[], float]
    rng: Random
    room: WaitingChoices
    settings: DispatchSettings
    health: WorkerHealth
    hedging: Hedging | None
    """Hedging of late first tokens; None: off."""


class Waiting(Enum):
    """Event that a choice without a worker waits for."""

    FOR_WORKER = "for_worker"
    """No worker is left or has joined yet: the choice continues when one joins, if that happens in time."""
    FOR_ROOM = "for_room"
    """Every worker is full: the choice tries again until its deadline."""
