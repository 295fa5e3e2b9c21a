"""Files that are read again when they change, such as keys and certificates.

Invalid content changes nothing. A file that cannot be read is retried at every check; `WatchedFile.trust_s` bounds how
long the content read before stays in force.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.access.file_trust import FileTrust
from tandem.errors import ConfigError, UnreadableFile

_CHECK_S = 1.0
_log = logging.getLogger(__name__)
_Seen = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFile:
    """One file, or several that belong together, to watch."""

    what: str
    """Name in logs and metrics."""
    paths: Sequence[Path]
    load: Callable[[], Any]
    """Reads the files, in a thread; raises ConfigError."""
    apply: Callable[[Any], None]
    """Applies the loaded content, on the event loop."""
    trust_s: float | None = None
    """Time for which the content stays in force while the files are unreadable; see `FileWatcher.distrust_reason`.
    None: unlimited."""

    def seen(self) -> _Seen:
        """Return a fingerprint that differs whenever one of the files has changed."""
        return tuple(map(_stat, self.paths))


class _Watch:
    """Follows one WatchedFile in a task of its own, so that a hanging file system delays no other file."""

    def __init__(self, file: WatchedFile, check_s: float, clock: Callable[[], float]) -> None:
        self.file = file
        self.counts = {"taken": 0, "refused": 0}
        self.trust = FileTrust(clock(), trust_s=file.trust_s)
        self.wake = asyncio.Event()
        self._check_s = check_s
        self._clock = clock
        self._seen: _Seen = ()
        self._has_logged_distrust = False

    async def begin(self) -> None:
        """Read it for the first time. Raises ConfigError when its content is invalid."""
        self._seen = self.file.seen()
        self.file.apply(await asyncio.to_thread(self.file.load))
        self.trust.on_taken(self._clock())

    async def run(self) -> None:
        """Check the file periodically, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self.wake.wait()
            self.wake.clear()
            check = asyncio.ensure_future(self.check())
            try:
                while not check.done():
                    await asyncio.wait({check}, timeout=self._check_s)
                    if not check.done() and (problem := self.trust.on_waiting(self._clock())) is not None:
                        self._refuse(f"{self.file.what}: {problem}")
                    self.log_distrust()
                await check
            finally:
                check.cancel()

    async def check(self) -> None:
        """Reread the file if it has changed, or could not be read the last time."""
        seen = await asyncio.to_thread(self.file.seen)
        if seen == self._seen and self.trust.is_readable:
            self.trust.on_unchanged(self._clock())
            return
        self._seen = seen
        try:
            self.file.apply(await asyncio.to_thread(self.file.load))
        except (UnreadableFile, OSError) as error:
            self._report_unreadable(error)
        except ConfigError as error:
            self.trust.on_refused(self._clock())
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next change must be seen
            # Files that vanish while being read may raise errors that no check foresaw. Their state is unknown then.
            self._report_unreadable(error)
        else:
            self.trust.on_taken(self._clock())
            self.counts["taken"] += 1
            _log.info("%s: read again", self.file.what)

    def log_distrust(self) -> None:
        """Log once that the content in force has lapsed."""
        reason = self.trust.distrust_reason(self._clock())
        if reason is not None and not self._has_logged_distrust:
            _log.critical("%s: %s; what was read before is no longer in force", self.file.what, reason)
        self._has_logged_distrust = reason is not None

    def _report_unreadable(self, error: Exception) -> None:
        # Texts of errors that are not ours might contain a secret, so they are not logged.
        message = str(error) if isinstance(error, ConfigError) else f"{self.file.what}: {type(error).__name__}"
        if self.trust.on_unreadable(message):
            self._refuse(message)

    def _refuse(self, message: str) -> None:
        self.counts["refused"] += 1
        if self.trust.is_readable or self.file.trust_s is None:
            _log.error("%s; what was read before stays in force", message)
        else:
            _log.error(
                "%s; what was read before stays in force for %g s unless it can be read again",
                message,
                self.file.trust_s,
            )


class FileWatcher:
    """Checks files once a second while entered, and counts the outcome of each change in metrics."""

    def __init__(
        self, files: Sequence[WatchedFile], *, check_s: float = _CHECK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._watches = {file.what: _Watch(file, check_s, clock) for file in files}
        self._tasks: list[asyncio.Task[None]] = []

    def check_now(self) -> None:
        """Check all files now: one has changed."""
        for watch in self._watches.values():
            watch.wake.set()

    def distrust_reason(self, what: str) -> str | None:
        """Return why the content of these files may no longer be relied on, None while it may: they were unreadable too
        long.

        Decided by the clock rather than by the watching task, so that it holds even if that task ends.
        """
        return self._watches[what].trust.distrust_reason(self._clock())

    async def __aenter__(self) -> Self:
        """Read all files. Raises ConfigError when one is invalid from the start."""
        for watch in self._watches.values():
            await watch.begin()
        self._tasks = [asyncio.create_task(watch.run()) for watch in self._watches.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> None:
        """Reread every file that has changed."""
        for watch in self._watches.values():
            await watch.check()

    def collect(self) -> Iterator[Metric]:
        reloads = CounterMetricFamily(
            "tandem_file_reloads", "Reloads of changed files, by result", labels=("file", "result")
        )
        stale = GaugeMetricFamily(
            "tandem_file_stale_seconds",
            "Seconds since a file in use could last be verified against the disk; 0 while it can be",
            labels=("file",),
        )
        for what, watch in self._watches.items():
            for result, count in watch.counts.items():
                reloads.add_metric((what, result), count)
            stale.add_metric((what,), watch.trust.stale_s(self._clock()))
        yield reloads
        yield stale


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
