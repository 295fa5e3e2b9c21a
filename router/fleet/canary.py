"""Proof that decode engines live: a worker that has been silent for long is asked for one token.

A session says only that the worker's process lives. `CanarySchedule` decides, without I/O, who is asked and what an
outcome means; `Canary` asks through dispatch, as any request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

from router.types.requests import MAX_PRIORITY, RoutedRequest, Streamer
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.errors import Overloaded, ServingError
from tandem.values.ids import BlockHash, RequestId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams

CANARY_SALT = "canary"
NO_TOKENS = "no decode worker gives tokens"
_TOKEN_ID = 0  # of every vocabulary; what it means does not matter
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """When to doubt a worker, and for how long to wait for the proof."""

    silence_s: float = 10.0
    """Without a token for so long, a worker is asked for one; busy workers never are."""
    timeout_s: float = 10.0
    interval_s: float = 2.0


class CanarySchedule:
    """Whose engine is in doubt, and whose was found dead. A worker that has just joined is believed at first."""

    def __init__(self, settings: CanarySettings) -> None:
        self._settings = settings
        self._failed_s: dict[WorkerKey, float] = {}

    def due(self, workers: Iterable[WorkerSnapshot], now_s: float) -> list[WorkerKey]:
        """Workers to ask now; what is known of those that left is forgotten."""
        decoders = {w.info.key: w for w in workers if w.info.role is WorkerRole.DECODE and not w.draining}
        self._failed_s = {key: at_s for key, at_s in self._failed_s.items() if key in decoders}
        return [key for key, worker in decoders.items() if now_s - worker.answered_s >= self._settings.silence_s]

    @property
    def has_failures(self) -> bool:
        """Whether a canary of a worker that is still here has ever failed."""
        return bool(self._failed_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """It was asked and gave no token."""
        self._failed_s[key] = now_s

    def answering(self, worker: WorkerSnapshot) -> bool:
        """Whether a token came since the last canary that failed, if any did."""
        failed_s = self._failed_s.get(worker.info.key)
        return failed_s is None or worker.answered_s > failed_s


class Canary:
    """Asks in the background while entered."""

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
        self._registry = registry
        self._generator = generator
        self._hash_root = hash_root
        self._settings = settings or CanarySettings()
        self._clock = clock
        self._schedule = CanarySchedule(self._settings)
        self._numbers = count()
        self._task: asyncio.Task[None] | None = None

    @property
    def answering(self) -> Callable[[WorkerSnapshot], bool]:
        """For readiness: whether a worker's engine is thought to live."""
        return self._schedule.answering

    def no_tokens_reason(self) -> str | None:
        """Why new requests need not wait: there are decode workers, and each failed its last canary."""
        if not self._schedule.has_failures:
            return None  # asked before every request
        decoders = [w for w in self._registry.snapshots() if w.info.role is WorkerRole.DECODE and not w.draining]
        return NO_TOKENS if decoders and not any(map(self.answering, decoders)) else None

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
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def ask(self, key: WorkerKey) -> bool:
        """One canary, and what its outcome means; whether a token came."""
        try:
            async with aclosing(self._generator.generate(self._request(key))) as deltas:
                async for _ in deltas:
                    pass
        except Overloaded:
            return False  # Says nothing of the engine: there was no room for the question.
        except ServingError as error:
            _log.warning("decode worker %s gave no token when asked for one: %s", key.worker_id, error.message)
            self._schedule.failed(key, self._clock())
            self._registry.penalise(key, self._settings.silence_s)
            return False
        return True

    async def _run(self) -> None:
        while True:
            try:
                await self._ask_all()
            except Exception:  # noqa: BLE001  # if this ended here, clients alone would find dead engines
                _log.exception("asking workers for tokens failed; it goes on")
            await asyncio.sleep(self._settings.interval_s)

    async def _ask_all(self) -> None:
        due = self._schedule.due(self._registry.snapshots(), self._clock())
        async with asyncio.TaskGroup() as tasks:
            for key in due:
                tasks.create_task(self.ask(key))

    def _request(self, key: WorkerKey) -> RoutedRequest:
        return RoutedRequest(
            request_id=RequestId(f"canary-{next(self._numbers)}"),
            prompt_token_ids=(_TOKEN_ID,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
            hash_root=self._hash_root,
            priority=MAX_PRIORITY,
            deadline_s=self._clock() + self._settings.timeout_s,
            only_worker=key,
        )
