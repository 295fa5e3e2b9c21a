"""Runs batches: a few requests at a time, and only while the cluster has spare capacity.

Life of a batch: validating → in progress → finalizing → completed; or failed, expired, cancelled. A router that stops,
or dies, leaves on disk what was answered; the next process to run the folder continues from there. The store writes on
a thread of its own, and finishes before another process may begin.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from router.batches.files.lines import answered, input_error, not_run, read_line
from router.batches.files.store import BatchStore, Results
from router.batches.files.types import BatchStatus, StoredBatch
from tandem.errors import InvalidRequest, ServingError

AnswerRequest = Callable[[str, str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Takes a tenant, an endpoint and a body; returns the status and body of the answer or refusal. Raises ServingError
when the same request may succeed later."""
_LOOK_S = 1.0
"""Period of checks of the folder; a request to this process wakes the runner at once."""
_ROOM_S = 0.1
"""Period of checks for spare capacity."""
_SWEEP_S = 60.0
"""Period of sweeps for expired files."""
_LINES_AT_ONCE = 512
"""Lines per transaction: other processes may write in between."""
MOST_AT_WORK = 16
MOST_OF_TENANT = 4
"""Batches that run at once, in total and per tenant. The others wait, the oldest first."""
_LONGEST_PAUSE_S = 10.0
_MOST_ERRORS = 20
_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """The location of an input line: all that is kept in memory until it runs."""

    custom_id: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerBounds:
    """Bounds on the batches that one process runs."""

    max_concurrent: int
    max_requests: int
    max_line_bytes: int
    parse: Callable[[bytes], Any]
    """Parses a line's JSON. Raises InvalidRequest."""


class BatchRunner:
    """Runs all batches of one folder; an async context manager."""

    def __init__(
        self,
        store: BatchStore,
        answer: AnswerRequest,
        has_room: Callable[[], bool],
        bounds: RunnerBounds,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`has_room`: whether the cluster would run another request at once and none is queued."""
        self._store = store
        self._answer = answer
        self._has_room = has_room
        self._bounds = bounds
        self._now = now
        self._permits = asyncio.Semaphore(bounds.max_concurrent)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._at_work: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Running batches by id, each with its tenant and task."""
        self._swept_s = -_SWEEP_S

    async def __aenter__(self) -> Self:
        """Open the store and start running. Raises OSError when the folder cannot be made."""
        await asyncio.to_thread(self._store.open)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop running; another process may continue the batches."""
        tasks = [*(task for _, task in self._at_work.values()), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._store.close)

    def wake(self) -> None:
        """Check for new and cancelled batches now."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            try:
                if self._store.may_run():
                    at_work = {name: tenant for name, (tenant, _) in self._at_work.items()}
                    for batch in await asyncio.to_thread(self._look, at_work):
                        self._at_work[batch.id] = batch.tenant, asyncio.create_task(self._keep(batch))
            except OSError:
                _log.exception("cannot read the batch folder")
            await self._pause(_LOOK_S)

    def _look(self, at_work: Mapping[str, str]) -> list[StoredBatch]:
        """Return the batches to start now, given those `at_work`, tenant by id."""
        now_s = self._now()
        if now_s - self._swept_s >= _SWEEP_S:
            self._swept_s = now_s
            self._store.sweep(now_s)
        return startable(self._store.live(), at_work, lambda batch: self.end_of(batch) is not None)

    def end_of(self, batch: StoredBatch) -> BatchStatus | None:
        """Return the status in which a batch ends before it has all its results; None: it continues."""
        if self._store.is_cancelled(batch):
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if self._now() >= batch.expires_s else None

    async def _pause(self, seconds: float) -> None:
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _keep(self, batch: StoredBatch) -> None:
        try:
            await self._work(batch)
        except OSError:
            _log.exception("batch %s failed unexpectedly", batch.id)
            await self._pause(_LONGEST_PAUSE_S)
        finally:
            del self._at_work[batch.id]

    async def _work(self, batch: StoredBatch) -> None:
        if batch.status is not BatchStatus.FINALIZING:
            ended = await self._answer_all(batch)
            if ended is None:
                return
            batch = ended
        end = BatchStatus(batch.ends_as)
        output, errors = await asyncio.to_thread(self._store.publish, batch, self._now())
        batch = batch.moved(end, self._now(), output_file_id=output, error_file_id=errors)
        await asyncio.to_thread(self._store.save, batch)

    async def _answer_all(self, batch: StoredBatch) -> StoredBatch | None:
        """Return the batch when it has all its results; None when it has failed."""
        try:
            path, lines = await asyncio.to_thread(self._read, batch)
        except _BadInput as bad:
            failed = batch.moved(BatchStatus.FAILED, self._now(), errors=tuple(bad.errors))
            await asyncio.to_thread(self._store.save, failed)
            return None
        results = await asyncio.to_thread(self._store.results, batch)
        if batch.status is BatchStatus.VALIDATING:
            batch = batch.moved(BatchStatus.IN_PROGRESS, self._now(), total=len(lines))
            await asyncio.to_thread(self._store.save, batch)
        end = await _Progress(self, batch, path, lines, results).run()
        batch = _counted(batch, results).moved(BatchStatus.FINALIZING, self._now(), ends_as=end.value)
        await asyncio.to_thread(self._store.save, batch)
        return batch

    def _read(self, batch: StoredBatch) -> tuple[Path, list[_Place]]:
        """Read the input and locate each of its lines. Raises _BadInput."""
        lines: list[_Place] = []
        errors = []
        names: set[str] = set()
        try:
            path = self._store.content(batch.tenant, batch.input_file_id)
        except ServingError as error:
            raise _BadInput([input_error(0, error)]) from None
        for number, (start, text) in enumerate(_texts(path), 1):
            try:
                if len(lines) >= self._bounds.max_requests:
                    raise InvalidRequest(f"more than {self._bounds.max_requests} requests")
                if len(text) > self._bounds.max_line_bytes:
                    raise InvalidRequest(f"a line has more than {self._bounds.max_line_bytes} bytes")
                line = read_line(self._bounds.parse(text), batch.endpoint)
                if line.custom_id in names:
                    raise InvalidRequest(f"custom_id {line.custom_id[:100]!r} is not unique", param="custom_id")
                names.add(line.custom_id)
                lines.append(_Place(line.custom_id, start, len(text)))
            except ServingError as error:
                errors.append(input_error(number, error))
                if len(errors) >= _MOST_ERRORS or len(lines) >= self._bounds.max_requests:
                    break
        if not lines and not errors:
            errors.append(input_error(0, InvalidRequest("the file has no requests")))
        if errors:
            raise _BadInput(errors)
        return path, lines


class _BadInput(Exception):
    """The input is invalid; none of it is run."""

    def __init__(self, errors: list[dict[str, object]]) -> None:
        super().__init__("invalid input")
        self.errors = errors


class _Progress:
    """The execution of one batch."""

    def __init__(
        self, runner: BatchRunner, batch: StoredBatch, path: Path, lines: Sequence[_Place], results: Results
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._path = path
        self._lines = lines
        self._results = results
        self._running: set[asyncio.Task[None]] = set()
        self._saved_s = runner._now()
        self._is_broken = False

    async def run(self) -> BatchStatus:
        """Run the batch and return its final status. Cancelling this ends requests in flight, to be run again later."""
        try:
            for number in range(len(self._lines)):
                if number in self._results.done:
                    continue
                if (end := await self._wait_for_idle_room()) is not None:
                    return await self._cut(end)
                if self._is_broken:
                    break
                task = asyncio.create_task(self._one(number))
                self._running.add(task)
                task.add_done_callback(self._ended)
            while self._running:
                await asyncio.wait(self._running, timeout=_LOOK_S)
                if (end := self._runner.end_of(self._batch)) is not None:
                    return await self._cut(end)
            if len(self._results.done) < len(self._lines):
                raise OSError("results could not be written")
            return BatchStatus.COMPLETED
        finally:
            await self._end_all()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._is_broken = True
            _log.error("batch %s: a result is missing: %s", self._batch.id, error)

    async def _wait_for_idle_room(self) -> BatchStatus | None:
        """Wait until one more request may start; return a status if the batch has ended instead."""
        runner = self._runner
        while (end := runner.end_of(self._batch)) is None:
            if runner._has_room() and not runner._permits.locked():
                await runner._permits.acquire()
                return None
            await runner._pause(_ROOM_S)
        return end

    async def _end_all(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _cut(self, end: BatchStatus) -> BatchStatus:
        """Mark requests without an answer as not run."""
        await self._end_all()
        message = "the batch was cancelled" if end is BatchStatus.CANCELLED else "the batch expired"
        code = f"batch_{end.value}"
        missing = [number for number in range(len(self._lines)) if number not in self._results.done]
        for begin in range(0, len(missing), _LINES_AT_ONCE):
            lines = [
                (number, not_run(self._batch.id, number, self._lines[number].custom_id, code, message))
                for number in missing[begin : begin + _LINES_AT_ONCE]
            ]
            await asyncio.to_thread(self._results.add, lines, is_error=True)
        return end

    async def _one(self, number: int) -> None:
        line = self._lines[number]
        try:
            body = await asyncio.to_thread(self._body, line)
            status, content = await self._answer(body)
        finally:
            self._runner._permits.release()
        text = answered(self._batch.id, number, line.custom_id, status, content)
        await asyncio.to_thread(self._results.add, [(number, text)], is_error=status >= 400)
        now_s = self._runner._now()
        if now_s - self._saved_s >= _LOOK_S:
            self._saved_s = now_s
            await asyncio.to_thread(self._runner._store.save, _counted(self._batch, self._results))

    def _body(self, line: _Place) -> dict[str, Any]:
        with self._path.open("rb") as file:
            file.seek(line.start)
            return read_line(self._runner._bounds.parse(file.read(line.size)), self._batch.endpoint).body

    async def _answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        runner = self._runner
        while True:
            try:
                return await runner._answer(self._batch.tenant, self._batch.endpoint, body)
            except ServingError as error:
                pause_s = min(_LONGEST_PAUSE_S, max(_ROOM_S, error.retry_after_s or 1.0))
            await asyncio.sleep(pause_s)


def _counted(batch: StoredBatch, results: Results) -> StoredBatch:
    failed = len(results.failed)
    return replace(batch, completed=len(results.done) - failed, failed=failed)


def startable(
    live: Iterable[StoredBatch], at_work: Mapping[str, str], is_over: Callable[[StoredBatch], bool]
) -> list[StoredBatch]:
    """Return the batches of `live`, oldest first, that may start beside those `at_work`, tenant by id. One that
    `is_over` need not wait: it only has to be ended."""
    num_all, of_tenant = len(at_work), Counter(at_work.values())
    found = []
    for batch in live:
        if batch.id in at_work:
            continue
        if not is_over(batch):
            if num_all >= MOST_AT_WORK or of_tenant[batch.tenant] >= MOST_OF_TENANT:
                continue
            num_all += 1
            of_tenant[batch.tenant] += 1
        found.append(batch)
    return found


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines, with their offsets."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if text := line.strip():
                yield start + line.index(text), text
            start += len(line)
