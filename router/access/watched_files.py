"""Files that are read again when they change, such as keys and certificates.

What makes no sense changes nothing. A file that cannot be read is tried again at every look; for how long what was read
of it before is good meanwhile, `WatchedFile.trust_s` says.
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
    """Some files that belong together."""

    what: str
    """For logs and metrics."""
    paths: Sequence[Path]
    load: Callable[[], Any]
    """In a thread; raises ConfigError."""
    apply: Callable[[Any], None]
    """On the event loop."""
    trust_s: float | None = None
    """How long what was read stays good while the files are unreadable (see `FileWatcher.distrust`); None: for ever."""

    def seen(self) -> _Seen:
        """Something else whenever one of them is."""
        return tuple(map(_stat, self.paths))


class _Watch:
    """Follows one WatchedFile. Each has a task of its own: a file system that hangs holds up nobody else's files."""

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
        """Read it for the first time. Raises ConfigError when it makes no sense."""
        self._seen = self.file.seen()
        self.file.apply(await asyncio.to_thread(self.file.load))
        self.trust.on_taken(self._clock())

    async def run(self) -> None:
        """Look again and again."""
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
        """Read it again if it has changed, or could not be read the last time."""
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
            # Files that vanish while they are read may raise what no check foresaw. Nothing is known of them then.
            self._report_unreadable(error)
        else:
            self.trust.on_taken(self._clock())
            self.counts["taken"] += 1
            _log.info("%s: read again", self.file.what)

    def log_distrust(self) -> None:
        """Say so once when what was read has lapsed."""
        reason = self.trust.distrust(self._clock())
        if reason is not None and not self._has_logged_distrust:
            _log.critical("%s: %s; what was read before is good no more", self.file.what, reason)
        self._has_logged_distrust = reason is not None

    def _report_unreadable(self, error: Exception) -> None:
        # No text of an error that is not ours is trusted to be no secret.
        message = str(error) if isinstance(error, ConfigError) else f"{self.file.what}: {type(error).__name__}"
        if self.trust.on_unreadable(message):
            self._refuse(message)

    def _refuse(self, message: str) -> None:
        self.counts["refused"] += 1
        if self.trust.is_readable or self.file.trust_s is None:
            _log.error("%s; what was read before stays in force", message)
        else:
            _log.error(
                "%s; what was read before is good for %g s, unless it can be read again", message, self.file.trust_s
            )


class FileWatcher:
    """Looks at files once a second while entered, and counts in metrics what became of each change."""

    def __init__(
        self, files: Sequence[WatchedFile], *, check_s: float = _CHECK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._watches = {file.what: _Watch(file, check_s, clock) for file in files}
        self._tasks: list[asyncio.Task[None]] = []

    def check_now(self) -> None:
        """Look at all files now: one has changed."""
        for watch in self._watches.values():
            watch.wake.set()

    def distrust(self, what: str) -> str | None:
        """Why what was read of these files is not to be relied on any more, if so: they could not be read for so long.

        Decided by the clock and not by the task that watches, so that it holds if that should end.
        """
        return self._watches[what].trust.distrust(self._clock())

    async def __aenter__(self) -> Self:
        """Raises ConfigError when they make no sense from the beginning."""
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
        """Read again what has changed."""
        for watch in self._watches.values():
            await watch.check()

    def collect(self) -> Iterator[Metric]:
        reloads = CounterMetricFamily(
            "tandem_file_reloads", "Changed files that were read again", labels=("file", "result")
        )
        stale = GaugeMetricFamily(
            "tandem_file_stale_seconds",
            "For how long what is in force has not been known to be what the files say; 0 while it is",
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
