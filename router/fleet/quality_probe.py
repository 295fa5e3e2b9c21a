"""A text that every worker reads again and again: how well its model expects it.

A model that was quantized badly, a wrong checkpoint or a sick machine answer fluently, in time and with status 200;
what they change first is how probable ordinary text is to them. `ProbeSchedule` decides, without I/O, who is to read;
`QualityProbe` asks through dispatch, as any request, and shows each worker's loss.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from itertools import count
from math import isfinite
from types import TracebackType
from typing import Protocol, Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.types.prompt_scoring import PromptScoringRequest, ScoredPrompt
from router.types.requests import MAX_PRIORITY, ChoiceDelta, DeltaSink, RoutedRequest
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.errors import ServingError
from tandem.values.ids import BlockHash, RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

QUALITY_SALT = "quality"
_TIMEOUT_S = 30.0
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class PromptScoringRunner(Protocol):
    """What the probe needs of dispatch."""

    async def run(self, request: RoutedRequest, sink: DeltaSink) -> None: ...


class ProbeSchedule:
    """Who reads when: each worker once when it joins, and then once a period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._asked_s: dict[WorkerKey, float] = {}

    def due(self, workers: Iterable[WorkerSnapshot], now_s: float) -> list[tuple[WorkerKey, WorkerRole]]:
        """Workers to ask now; they count as asked. Those that left are forgotten."""
        there = {worker.info.key: worker for worker in workers if not worker.draining}
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key in there}
        due = [key for key in there if now_s - self._asked_s.get(key, -self._period_s) >= self._period_s]
        self._asked_s.update(dict.fromkeys(due, now_s))
        return [(key, there[key].info.role) for key in due]

    def knows(self, key: WorkerKey) -> bool:
        """Whether it is there and has been asked."""
        return key in self._asked_s


class QualityProbe(Collector):
    """Asks in the background while entered; a metric meanwhile."""

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
        self._registry = registry
        self._generator = generator
        self._tokens = tokens
        self._hash_root = hash_root
        self._clock = clock
        self._schedule = ProbeSchedule(period_s)
        self._losses: dict[WorkerKey, tuple[WorkerRole, float]] = {}
        self._numbers = count()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def look(self) -> None:
        """Have all read that are due, one after another: nobody's work should notice."""
        for key, role in self._schedule.due(self._registry.snapshots(), self._clock()):
            self._losses.pop(key, None)  # what it was says nothing of a worker that does not read any more
            if (reading := await self._read(key)) is None:
                continue
            if isfinite(loss := loss_of(reading)):
                self._losses[key] = (role, loss)
            else:
                _log.warning("worker %s reads the quality probe as %s: its model is broken", key.worker_id, loss)
        self._losses = {key: found for key, found in self._losses.items() if self._schedule.knows(key)}

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "tandem_quality_loss_nats",
            "Mean negative log probability of a token of the probe's text, as each worker's model has it",
            labels=("worker", "role"),
        )
        for key, (role, loss) in self._losses.items():
            family.add_metric((key.worker_id, role.value), loss)
        yield family

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001  # a router serves on without its probe
                _log.exception("the quality probe failed; it goes on")
            await asyncio.sleep(_LOOK_S)

    async def _read(self, key: WorkerKey) -> ScoredPrompt | None:
        kept = _ScoresSink()
        try:
            await self._generator.run(self._request(key), kept)
        except ServingError as error:
            _log.warning("worker %s did not read the quality probe: %s", key.worker_id, error.message)
        return kept.reading or None

    def _request(self, key: WorkerKey) -> RoutedRequest:
        return RoutedRequest(
            request_id=RequestId(f"quality-{next(self._numbers)}"),
            prompt_token_ids=self._tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            hash_root=self._hash_root,
            priority=MAX_PRIORITY,
            deadline_s=self._clock() + _TIMEOUT_S,
            only_worker=key,
            reads=PromptScoringRequest(num_top=0, only=True),
        )


class _ScoresSink:
    """Keeps what was read."""

    def __init__(self) -> None:
        self.reading: ScoredPrompt | None = None

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self.reading = delta.reading or self.reading
        return False

    async def ready(self) -> None:
        """See Reader."""


def loss_of(reading: ScoredPrompt) -> float:
    return -sum(reading.logprobs) / len(reading)
