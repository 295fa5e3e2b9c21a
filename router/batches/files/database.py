"""The SQLite database of files and batches: many readers, one writing thread. Blocking.

All router processes of a host open the same file. Write-ahead logging lets readers continue while one writes; a write
is a transaction, so a process that is killed leaves all of it or nothing. Errors of SQLite are raised as OSError.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from router.batches.files.private_files import open_private

_T = TypeVar("_T")
_BUSY_S = 10.0
"""Time limit of a write that waits for another process's."""
_VERSION = 1
_MAX_IDLE_WAL_BYTES = 4 << 20
_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, created_s);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s INTEGER NOT NULL, is_final INTEGER NOT NULL,
    is_cancelled INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, created_s);
CREATE INDEX IF NOT EXISTS live_batches ON batches (created_s) WHERE NOT is_final;
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, is_error INTEGER NOT NULL, line BLOB NOT NULL,
    PRIMARY KEY (batch_id, number)
);
"""


class _Connection:
    """One thread's connection. SQLite does not survive a close during another thread's call: `lock` guards both."""

    def __init__(self, path: Path) -> None:
        # Other threads only close it. `write` begins transactions explicitly.
        self.sqlite = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self.sqlite.execute(
            "PRAGMA synchronous = NORMAL"
        )  # a killed process loses nothing, a machine without power little
        self.sqlite.execute(f"PRAGMA journal_size_limit = {_MAX_IDLE_WAL_BYTES}")
        self.lock = threading.RLock()
        self.thread = threading.current_thread()
        self.is_closed = False

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self.sqlite.close()


class Database:
    """One file, opened by `open`. Reads happen on the calling thread, writes on the database's own.

    There are as many connections as living threads that have read: those of the event loop's executor, at most 32, and
    the one that writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._connections: list[_Connection] = []
        self._registering = threading.Lock()
        self._writer: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Create what is missing. One process at a time. Raises OSError."""
        open_private(self._path, "ab").close()  # the write-ahead log gets the same mode
        with _as_os_errors():
            connection = self._own().sqlite
            [(version,)] = connection.execute("PRAGMA user_version")
            if version > _VERSION:
                raise OSError(errno.EPROTO, f"the database has version {version}, but at most {_VERSION} is supported")
            if version < _VERSION:
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA user_version = {_VERSION}")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="batch-store")

    def close(self) -> None:
        """Finish pending writes. Reads still work afterwards; writes raise RuntimeError."""
        if self._writer is not None:
            self._writer.shutdown()
        with self._registering:
            connections, self._connections = self._connections, []
        self._local = threading.local()
        for connection in connections:
            connection.close()

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query. Raises OSError."""
        with _as_os_errors(), self._held() as connection:
            return connection.execute(sql, values).fetchall()

    def iterate(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield rows one by one, for results that are too large for memory. Raises OSError."""
        with _as_os_errors(), self._held() as connection:
            yield from connection.execute(sql, values)

    def write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` in a transaction on the writing thread. Raises OSError, in which case nothing was written."""
        if self._writer is None:
            raise RuntimeError("the database is not open")
        return self._writer.submit(self._transact, work).result()

    def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with _as_os_errors(), self._held() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

    @contextmanager
    def _held(self) -> Iterator[sqlite3.Connection]:
        """Lock the calling thread's connection against being closed meanwhile."""
        while True:
            own = self._own()
            with own.lock:
                if not own.is_closed:
                    yield own.sqlite
                    return

    def _own(self) -> _Connection:
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None or found.is_closed:
            found = self._local.connection = _Connection(self._path)
            self._register(found)
        return found

    def _register(self, new: _Connection) -> None:
        """Keep it for `close`, and close those of threads that have ended."""
        with self._registering:
            living = [one for one in self._connections if one.thread.is_alive()]
            ended = [one for one in self._connections if not one.thread.is_alive()]
            self._connections = [*living, new]
        for one in ended:
            one.close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        code = errno.ENOSPC if is_full else errno.EIO
        raise OSError(code, os.strerror(code) if is_full else f"SQLite: {error}") from None
