"""The router's own health checks of workers: a one-token canary, and a text that every worker scores.

An open session proves only that the worker's process lives. So a decode worker that has produced no token for long is
sent a request for one (`Canary`). A badly quantized model, a wrong checkpoint or a faulty machine still answers
fluently, in time and with status 200; what changes first is how probable it finds ordinary text (`QualityProbe`).
Schedules decide, without I/O, which workers to probe and what an outcome means; probes go through dispatch, but skip
the queue.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from math import isfinite
from types import TracebackType
from typing import Protocol, Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import MAX_PRIORITY, ChoiceDelta, DeltaSink, RoutedRequest, Streamer
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.errors import Overloaded, ServingError
from tandem.values.ids import BlockHash, RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

CANARY_SALT = "canary"
QUALITY_SALT = "quality"
NO_TOKENS = "no decode worker produces tokens"
_TOKEN_ID = 0  # of every vocabulary; what it means does not matter
_CANARY_PAUSE_S = 0.0025
"""Pause between two canaries: a thousand at once would make the router's streams wait."""
_READING_TIMEOUT_S = 30.0
_READING_INTERVAL_S = 1.0
_log = logging.getLogger(__name__)


class BackgroundProbe(ABC):
    """Probes workers periodically in a background task while entered."""

    def __init__(self, registry: WorkerRegistry, name: str, *, interval_s: float, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._name = name
        self._interval_s = interval_s
        self._clock = clock
        self._numbers = count()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])  # the caller may be cancelled while it waits here, and must then see it

    @abstractmethod
    async def probe_due(self) -> None:
        """Probe the workers that are due."""

    async def _run(self) -> None:
        while True:
            try:
                await self.probe_due()
            except Exception:  # noqa: BLE001  # a router serves on without its probes
                _log.exception("the %s probe failed; it will run again", self._name)
            await asyncio.sleep(self._interval_s)

    def _next_id(self) -> RequestId:
        return RequestId(f"{self._name}-{next(self._numbers)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """Conditions for probing a worker, and the time limit for its token."""

    silence_s: float = 10.0
    """Seconds without a token after which a worker is probed; busy workers never are."""
    timeout_s: float = 10.0
    interval_s: float = 2.0


class CanarySchedule:
    """Decides which workers to probe and which are dead. A worker that has just joined counts as live."""

    def __init__(self, settings: CanarySettings) -> None:
        self._settings = settings
        self._failed_s: dict[WorkerKey, float] = {}

    def due(self, workers: Iterable[WorkerSnapshot], now_s: float) -> list[WorkerKey]:
        """Workers to probe now; forgets those that left."""
        decoders = {w.info.key: w for w in workers if w.info.role is WorkerRole.DECODE and not w.draining}
        self._failed_s = {key: at_s for key, at_s in self._failed_s.items() if key in decoders}
        return [key for key, worker in decoders.items() if now_s - worker.answered_s >= self._settings.silence_s]

    @property
    def has_failures(self) -> bool:
        """Whether a canary of a connected worker has ever failed."""
        return bool(self._failed_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """Record a canary that produced no token."""
        self._failed_s[key] = now_s

    def answering(self, worker: WorkerSnapshot) -> bool:
        """Whether a token came since the worker's last failed canary, if any failed."""
        failed_s = self._failed_s.get(worker.info.key)
        return failed_s is None or worker.answered_s > failed_s


class Canary(BackgroundProbe):
    """Requests one token from decode workers that have been silent."""

    def __init__(
        self,
        registry: WorkerRegistry,
        generator: Streamer,
        *,
        hash_root: BlockHash,
        settings: CanarySettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hash_root` must be one that no client's request can have."""
        self._settings = settings or CanarySettings()
        super().__init__(registry, "canary", interval_s=self._settings.interval_s, clock=clock)
        self._generator = generator
        self._hash_root = hash_root
        self._schedule = CanarySchedule(self._settings)
        self._next_s = 0.0

    @property
    def answering(self) -> Callable[[WorkerSnapshot], bool]:
        """Whether a worker's engine counts as live, for readiness."""
        return self._schedule.answering

    def no_tokens_reason(self) -> str | None:
        """The reason to refuse new requests when every decode worker failed its last canary, else None."""
        if not self._schedule.has_failures:
            return None  # the fast path: this runs before every request
        decoders = [w for w in self._registry.snapshots() if w.info.role is WorkerRole.DECODE and not w.draining]
        return NO_TOKENS if decoders and not any(map(self.answering, decoders)) else None

    async def probe(self, key: WorkerKey) -> bool:
        """Send one canary in its turn and record its outcome; whether a token came."""
        await self._turn()
        return await self._send(key)

    async def _turn(self) -> None:
        now_s = self._clock()
        self._next_s = max(now_s, self._next_s + _CANARY_PAUSE_S)
        if self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)

    def _is_gone(self, key: WorkerKey) -> bool:
        worker = self._registry.find(key)
        return worker is None or worker.draining

    async def _send(self, key: WorkerKey) -> bool:
        if self._is_gone(key):
            return False
        try:
            async with aclosing(self._generator.generate(self._request(key))) as deltas:
                async for _ in deltas:
                    pass
        except Overloaded:
            return False  # says nothing about the engine: the canary was refused for lack of room
        except ServingError as error:
            if self._is_gone(key):
                return False
            _log.warning("decode worker %s produced no token for a canary: %s", key.worker_id, error.message)
            self._schedule.failed(key, self._clock())
            self._registry.penalise(key, self._settings.silence_s)
            return False
        return True

    async def probe_due(self) -> None:
        due = self._schedule.due(self._registry.snapshots(), self._clock())
        async with asyncio.TaskGroup() as tasks:
            for key in due:
                tasks.create_task(self._probe_silent(key))

    async def _probe_silent(self, key: WorkerKey) -> None:
        """Probe a worker unless it has answered before its turn came."""
        await self._turn()
        worker = self._registry.find(key)
        if worker is not None and self._clock() - worker.answered_s >= self._settings.silence_s:
            await self._send(key)

    def _request(self, key: WorkerKey) -> RoutedRequest:
        return RoutedRequest(
            request_id=self._next_id(),
            prompt_token_ids=(_TOKEN_ID,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
            hash_root=self._hash_root,
            priority=MAX_PRIORITY,
            deadline_s=self._clock() + self._settings.timeout_s,
            only_worker=key,
        )


class PromptScoringRunner(Protocol):
    """The part of dispatch that the probe needs."""

    async def run(self, request: RoutedRequest, sink: DeltaSink) -> None: ...


class ProbeSchedule:
    """Decides when each worker is probed: when it joins, and then once a period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._probed_s: dict[WorkerKey, float] = {}

    def due(self, workers: Iterable[WorkerSnapshot], now_s: float) -> list[tuple[WorkerKey, WorkerRole]]:
        """Workers to probe now; they count as probed. Forgets those that left."""
        there = {worker.info.key: worker for worker in workers if not worker.draining}
        self._probed_s = {key: at_s for key, at_s in self._probed_s.items() if key in there}
        due = [key for key in there if now_s - self._probed_s.get(key, -self._period_s) >= self._period_s]
        self._probed_s.update(dict.fromkeys(due, now_s))
        return [(key, there[key].info.role) for key in due]

    def knows(self, key: WorkerKey) -> bool:
        """Whether the worker is present and has been probed."""
        return key in self._probed_s


class QualityProbe(BackgroundProbe, Collector):
    """Has every worker score a text, and exports the mean loss per worker."""

    def __init__(
        self,
        registry: WorkerRegistry,
        generator: PromptScoringRunner,
        *,
        tokens: tuple[int, ...],
        hash_root: BlockHash,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hash_root` must be one that no client's request can have."""
        super().__init__(registry, "quality", interval_s=_READING_INTERVAL_S, clock=clock)
        self._generator = generator
        self._tokens = tokens
        self._hash_root = hash_root
        self._schedule = ProbeSchedule(period_s)
        self._losses: dict[WorkerKey, tuple[WorkerRole, float]] = {}

    async def probe_due(self) -> None:
        """Have the workers that are due score the text, one after another so as not to disturb serving."""
        for key, role in self._schedule.due(self._registry.snapshots(), self._clock()):
            self._losses.pop(key, None)  # an earlier loss says nothing about a worker that fails the probe now
            if (scored := await self._score(key)) is None:
                continue
            if isfinite(loss := loss_of(scored)):
                self._losses[key] = (role, loss)
            else:
                _log.warning(
                    "worker %s has a loss of %s on the quality probe: its model is broken", key.worker_id, loss
                )
        self._losses = {key: found for key, found in self._losses.items() if self._schedule.knows(key)}

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "tandem_quality_loss_nats",
            "Mean negative log probability per token of the quality probe's text, by worker",
            labels=("worker", "role"),
        )
        for key, (role, loss) in self._losses.items():
            family.add_metric((key.worker_id, role.value), loss)
        yield family

    async def _score(self, key: WorkerKey) -> ScoredPrompt | None:
        kept = ScoresSink()
        try:
            await self._generator.run(self._request(key), kept)
        except ServingError as error:
            _log.warning("worker %s did not score the quality probe: %s", key.worker_id, error.message)
        return kept.scored or None

    def _request(self, key: WorkerKey) -> RoutedRequest:
        return RoutedRequest(
            request_id=self._next_id(),
            prompt_token_ids=self._tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            hash_root=self._hash_root,
            priority=MAX_PRIORITY,
            deadline_s=self._clock() + _READING_TIMEOUT_S,
            only_worker=key,
            scoring=PromptScoringRequest(num_top=0, only=True),
        )


class ScoresSink(DeltaSink):
    """Keeps the scored prompt."""

    def __init__(self) -> None:
        self.scored: ScoredPrompt | None = None

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self.scored = delta.scored or self.scored
        return False

    async def ready(self) -> None: ...


def loss_of(scored: ScoredPrompt) -> float:
    return -sum(scored.logprobs) / len(scored)
