"""The queue of a sending end's writes to one peer: bounded, performed in order on one thread, stoppable by attempt."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kv_transfer.memory.write_stop_lock import BurstLock
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.interface import WriteOrder, WriteResult
from tandem.errors import TransferError
from tandem.telemetry.logs import about

MAX_QUEUED = 4096

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class WriteJob:
    """One order. Its sources are read only under the queue's `lock` while not `stopped`, or while `reading`.

    `reading` means that hardware which cannot be stopped (a network card, a GPU) reads them: then the future ends when
    that has ended. The event loop takes the lock, so slow work must not hold it.
    """

    order: WriteOrder
    future: "Future[WriteResult]" = field(default_factory=Future)
    stopped: bool = False
    reading: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def succeed(self, checksum: int, num_bytes: int) -> None:
        """Complete the future, unless it has ended already."""
        seconds = time.monotonic() - self.started_s
        # A cancel on another thread may have ended it first.
        with suppress(InvalidStateError):
            self.future.set_result(WriteResult(checksum=checksum, num_bytes=num_bytes, seconds=seconds))

    def fail(self, reason: str) -> None:
        """Fail the future, unless it has ended already."""
        with suppress(InvalidStateError):
            self.future.set_exception(TransferError(reason))

    def check(self) -> None:
        """Raise TransferError when the job must stop."""
        if self.stopped:
            raise TransferError("write cancelled")


class WriteQueue:
    """Runs `perform(job)` for each job on its own thread; `idle()` whenever none is left, and before the thread ends.

    `perform` may raise TransferError to fail that job; any other exception fails the whole queue for good. It may leave
    a job to be ended by a later call, of `idle` at the latest.
    """

    def __init__(self, name: str, perform: Callable[[WriteJob], None], idle: Callable[[], None] = lambda: None) -> None:
        self.lock = BurstLock()
        self._perform = perform
        self._idle = idle
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._jobs: dict[TransferKey, set[WriteJob]] = {}
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether every further write fails."""
        return self._failure is not None

    def submit(self, order: WriteOrder) -> "Future[WriteResult]":
        """Queue a write; when the queue is full or has failed, its future fails at once."""
        job = WriteJob(order=order)
        with self.lock:
            reason = self._failure
            if reason is None and self._queue.qsize() >= MAX_QUEUED:
                reason = f"{MAX_QUEUED} writes are queued to this peer"
            if reason is None:
                self._queue.put(job)
                self._jobs.setdefault(order.key, set()).add(job)
        if reason is not None:
            job.fail(reason)
            return job.future
        job.future.add_done_callback(lambda _future: self._forget(job))
        return job.future

    def cancel(self, key: TransferKey) -> bool:
        """Stop every write of `key`. True: none of them reads its sources any more; False: some end later."""
        with self.lock:
            jobs = list(self._jobs.get(key, ()))
            idle = [job for job in jobs if not job.reading]
            for job in jobs:
                job.stopped = True
        for job in idle:
            job.fail("write cancelled")
        return len(idle) == len(jobs)

    @contextmanager
    def reading(self, job: WriteJob) -> Iterator[None]:
        """Context of work that reads the job's sources without the lock, on the queue's own thread.

        Raises TransferError when the job was stopped before or meanwhile; its future has then ended too.
        """
        with self.lock:
            job.check()
            job.reading = True
        try:
            yield
        finally:
            with self.lock:
                job.reading = False
                reason = (self._failure or "write cancelled") if job.stopped else None
            if reason is not None:
                job.fail(reason)
        if reason is not None:
            raise TransferError(reason)

    def fail_all(self, reason: str) -> None:
        """Stop every write and refuse new ones, because the connection has ended."""
        with self.lock:
            self._failure = self._failure or reason
            jobs = [job for jobs in self._jobs.values() for job in jobs]
            idle = [job for job in jobs if not job.reading]
            for job in jobs:
                job.stopped = True
        for job in idle:
            job.fail(reason)

    def close(self) -> None:
        """Stop every write and the thread. Must not be called on that thread."""
        self.fail_all("connection closed")
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if job.stopped:
                continue
            job.started_s = time.monotonic()
            try:
                self._perform(job)
            except TransferError as error:
                job.fail(error.message)
            except Exception as error:
                # The thread's outermost frame: the error would be lost. The write may have stopped anywhere, so the
                # connection is unusable; the thread goes on to discard what is queued.
                name = job.order.key.transfer_id
                log.exception(
                    "%s: a KV write failed because of an internal error: %s",
                    name,
                    type(error).__name__,
                    extra=about(name),
                )
                self.fail_all(f"internal error: {type(error).__name__}")
        self._finish()

    def _next(self) -> WriteJob | None:
        if self._queue.empty():
            self._finish()
        return self._queue.get()

    def _finish(self) -> None:
        try:
            self._idle()
        except Exception as error:
            log.exception("KV writes failed because of an internal error: %s", type(error).__name__)
            self.fail_all(f"internal error: {type(error).__name__}")

    def _forget(self, job: WriteJob) -> None:
        with self.lock:
            jobs = self._jobs.get(job.order.key)
            if jobs is not None:
                jobs.discard(job)
                if not jobs:
                    del self._jobs[job.order.key]


class QueuedWriter(ABC):
    """Base of the PeerWriters, which all have a queue."""

    def __init__(self, thread_name: str) -> None:
        self._queue = WriteQueue(thread_name, self._perform, self._idle)

    @property
    def closed(self) -> bool:
        return self._queue.failed

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        return self._queue.submit(order)

    def cancel(self, key: TransferKey) -> bool:
        return self._queue.cancel(key)

    def close(self) -> None:
        self._queue.close()

    @abstractmethod
    def _perform(self, job: WriteJob) -> None:
        """Perform one write, on the queue's thread; see WriteQueue."""

    def _idle(self) -> None:  # noqa: B027 - most leave nothing under way
        """End what `_perform` has left under way; see WriteQueue."""
