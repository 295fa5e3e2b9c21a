"""The audit log's file. A thread of its own writes it, so that neither a slow nor a full disk delays a request.

Lines wait in a bounded queue; a line that finds no room there or on the disk is lost and counted. Several router
processes append to the same file, each line in one write. The process that finds the file full renames it; the others
notice that the name now belongs to another file, which is also how `logrotate` is detected. For why logging's handlers
are not used, see `docs/extend/adr/0020-audit-log-keeps-its-own-writer.md`.
"""

import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import orjson
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from router.access.audit_log import AuditEntry
from tandem.config.access import AuditConfig
from tandem.errors import ConfigError

_MAX_QUEUED = 8192
_MAX_BATCH = 256
_CLOSE_S = 5.0
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class AuditFile:
    """An `AuditLog` that writes to a file, and the collector of its metric. Owns its thread; `close` flushes the
    queue."""

    def __init__(self, config: AuditConfig, *, write: Callable[[int, bytes], int] = os.write) -> None:
        """Open the file. Raises ConfigError when it cannot be opened for writing."""
        self._path = Path(config.path)
        self._config = config
        self._os_write = write
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"router.audit_log.path: {config.path}: {error.strerror}") from None
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._warned_s = -_WARN_EVERY_S
        self.num_written = 0
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._thread.start()

    def keep(self, entry: AuditEntry) -> None:
        line = entry.to_line(datetime.now(UTC), time.monotonic() - entry.began_s)
        try:
            self._lines.put_nowait(orjson.dumps(line) + b"\n")
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Write out the queue, as far as the disk accepts it within some seconds."""
        try:
            self._lines.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        help_text = "Audit log lines: written, or lost because the queue or the disk was full"
        family = CounterMetricFamily("tandem_audit_lines", help_text, labels=("result",))
        family.add_metric(("written",), self.num_written)
        family.add_metric(("lost",), self.num_lost)
        yield family

    def _run(self) -> None:
        while (first := self._lines.get()) is not None:
            lines, ended = [first], False
            while len(lines) < _MAX_BATCH and not self._lines.empty():
                if (line := self._lines.get()) is None:
                    ended = True
                    break
                lines.append(line)
            self._append(lines)
            if ended:
                break
        os.close(self._fd)

    def _append(self, lines: list[bytes]) -> None:
        written = 0
        try:
            self._follow()
            # This process or another one found the disk full.
            is_broken = _ends_within_a_line(self._fd)
            for line in lines:
                data = b"\n" + line if is_broken else line
                is_broken = self._os_write(self._fd, data) < len(data)
                written += not is_broken
        except OSError as error:
            if time.monotonic() - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = time.monotonic()
                _log.warning("cannot write the audit log: %s", error.strerror)
        self.num_written += written
        self.num_lost += len(lines) - written

    def _follow(self) -> None:
        """Open the file that currently has the name, after rotating it if it is full."""
        if not self._is_current():
            self._reopen()
        if os.fstat(self._fd).st_size < self._config.max_bytes:
            return
        # One of the processes renames the file; the others wait here and then find the new one.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        if self._is_current():
            for index in range(self._config.keep - 1, 0, -1):
                if (older := self._numbered(index)).exists():
                    older.replace(self._numbered(index + 1))
            self._path.replace(self._numbered(1))
        self._reopen()

    def _is_current(self) -> bool:
        try:
            named, ours = self._path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (named.st_ino, named.st_dev) == (ours.st_ino, ours.st_dev)

    def _reopen(self) -> None:
        opened = self._open()
        os.close(self._fd)
        self._fd = opened

    def _numbered(self, index: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{index}")

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _ends_within_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
