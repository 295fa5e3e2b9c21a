"""Files that are read again when they change, such as keys and certificates. What makes no sense changes nothing."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from tandem.errors import ConfigError

_LOOK_S = 1.0
_log = logging.getLogger(__name__)
_Seen = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """Some files that belong together."""

    what: str
    """For logs and metrics."""
    paths: Sequence[Path]
    load: Callable[[], Any]
    """In a thread; raises ConfigError."""
    apply: Callable[[Any], None]
    """On the event loop."""

    def seen(self) -> _Seen:
        """Something else whenever one of them is."""
        return tuple(map(_stat, self.paths))


class LiveFiles:
    """Looks at files once a second while entered, and tells in metrics what became of each change."""

    def __init__(self, files: Sequence[LiveFile], *, look_s: float = _LOOK_S) -> None:
        self._files = files
        self._look_s = look_s
        self._seen: dict[str, _Seen] = {}
        self._counts = {(file.what, result): 0 for file in files for result in ("taken", "refused")}
        self._task: asyncio.Task[None] | None = None
        self._told = asyncio.Event()

    def look_now(self) -> None:
        """Somebody says that one has changed."""
        self._told.set()

    async def __aenter__(self) -> Self:
        """Raises ConfigError when they make no sense from the beginning."""
        for file in self._files:
            self._seen[file.what] = file.seen()
            file.apply(await asyncio.to_thread(file.load))
        if self._files:
            self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Read again what has changed."""
        for file in self._files:
            # A file system that hangs must not hang the loop.
            seen = await asyncio.to_thread(file.seen)
            if seen == self._seen[file.what]:
                continue
            self._seen[file.what] = seen
            try:
                file.apply(await asyncio.to_thread(file.load))
            except (ConfigError, OSError, ValueError) as error:
                # Files that vanish while they are read may raise what no check foresaw, of which no text is trusted
                # to be no secret; the next change must be seen all the same.
                told = str(error) if isinstance(error, ConfigError) else f"{file.what}: {type(error).__name__}"
                self._counts[file.what, "refused"] += 1
                _log.error("%s; what was read before stays in force", told)
            else:
                self._counts[file.what, "taken"] += 1
                _log.info("%s: read again", file.what)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = CounterMetricFamily(
            "tandem_file_reloads", "Changed files that were read again", labels=("file", "result")
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._told.wait()
            self._told.clear()
            await self.look()


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
