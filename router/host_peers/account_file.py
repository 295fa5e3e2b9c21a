"""The file with the rate-limit account of one host, as opened and mapped by one process.

A lock on its first byte is held for the few microseconds in which a request is counted; each process also locks another
byte for its lifetime, which shows that it is alive: the kernel releases both when the process ends, for any reason.
Each process counts its requests in flight in a column of its own, which the others read, so that those of a dead
process can be dropped.

    header:  number of columns in use · number of records · a router incarnation for each column
    record:  tenant tag · requests bucket · tokens bucket · requests in flight for each column
"""

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

from router.admission.rate_limits import LimitUsage, TokenBucket
from tandem.cluster_state.entries import TAG_BYTES
from tandem.values.ids import Incarnation

_MAX_COLUMNS: Final = 128
"""Twice the maximum of `router.processes`: while all are replaced, old and new ones run side by side."""
_MAX_RECORDS: Final = 1 << 16
_COUNTS: Final = struct.Struct("<II")
_INCARNATION: Final = struct.Struct("<Q")
_BUCKETS: Final = struct.Struct("<6d")
_NUM_INFLIGHT: Final = struct.Struct("<I")
_INCARNATIONS_AT: Final = 64
_RECORDS_AT: Final = 4096
_BUCKETS_AT: Final = TAG_BYTES
_COLUMNS_AT: Final = _BUCKETS_AT + _BUCKETS.size
_RECORD_BYTES: Final = _COLUMNS_AT + _MAX_COLUMNS * _NUM_INFLIGHT.size
_FILE_BYTES: Final = _RECORDS_AT + _MAX_RECORDS * _RECORD_BYTES
_CHUNK_BYTES: Final = 1 << 16
"""Disk space is claimed in steps of this size: writing to memory mapped to a file on a full disk kills the process."""
_ENDED: Final = 1 << 63
"""Flag in the incarnation of a dead process whose requests were dropped."""
_SPINS: Final = 50
_PAUSE_S: Final = 50e-6
_LONGEST_LOCK_S: Final = 0.25
"""Time limit of waiting for the lock, in case its holder was stopped; requests are then counted without it."""
_TOUCH_S: Final = 3600.0
"""Period of updating the file's time: unused files are removed, and some file systems ignore mapped writes."""
_log = logging.getLogger(__name__)


class AccountFile:
    """One process's view of the file. A process may open a file only once, since the kernel's locks belong to the
    process."""

    def __init__(self, path: Path, *, router: Incarnation) -> None:
        """Open or create the file and join the processes that share it; the file is then locked.

        `router`: identifies this process to routers of other hosts. Raises OSError when the file cannot be opened, its
        disk is full, or too many processes share it.
        """
        self._path = path
        self._router = router
        self._columns = struct.Struct("")
        self._record_at: dict[bytes, int] = {}
        self._num_read = 0
        self._claimed_bytes = 0
        self._is_locked = False
        self._is_stuck = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(self._descriptor)
            self._identity = (found.st_dev, found.st_ino)
            self.lock()
            self._map = self._map_file()
            self._column = self._take_column()
            self._read_header()
            self._clear_column(self._column)
            _INCARNATION.pack_into(self._map, _INCARNATIONS_AT + self._column * _INCARNATION.size, self._router)
        except BaseException:
            os.close(self._descriptor)  # this releases all locks
            raise

    def close(self) -> None:
        """Leave the file, dropping all that this process has in flight."""
        self.lock()
        self._drop(self._column)
        self._map.close()
        os.close(self._descriptor)  # this releases all locks

    def was_removed(self) -> bool:
        """Whether the file was removed or replaced. Also updates its time, so that it does not look unused."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # says nothing about the file
        if time.time() - found.st_mtime > _TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
        return (found.st_dev, found.st_ino) != self._identity

    def merge_from(self, former: "AccountFile") -> None:
        """Add the use recorded in a file that was removed, and what this process has in flight.

        Several processes do so, each when it notices: of two buckets the emptier one is kept. The caller holds the
        lock. Raises OSError when there is no room.
        """
        former.read_records()
        for tag, at in former._record_at.items():
            before, here = LimitUsage(), LimitUsage()
            former.load(tag, before)
            self.record(tag)
            self.load(tag, here)
            here.requests = _emptier(before.requests, here.requests)
            here.tokens = _emptier(before.tokens, here.tokens)
            (here.num_inflight,) = _NUM_INFLIGHT.unpack_from(former._map, former._inflight_at(at))
            self.store(tag, here)

    def routers(self) -> frozenset[Incarnation]:
        """Incarnations of the live processes, and of ended ones whose columns have not been taken yet."""
        self._read_header()
        return frozenset(Incarnation(self._incarnation(column) & ~_ENDED) for column in range(self._num_columns))

    def is_first(self) -> bool:
        """Whether this is the first of the live processes."""
        return not any(map(self._is_alive, range(self._column)))

    def lock(self) -> None:
        """Lock the account. Blocks for microseconds: its holder only does arithmetic.

        Behind a process that was stopped while holding it, this blocks the event loop longer, once, for at most
        `_LONGEST_LOCK_S`.
        """
        ends_s, tries = 0.0, 0
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except (BlockingIOError, PermissionError):
                tries += 1
                ends_s = ends_s or time.monotonic() + _LONGEST_LOCK_S
                if self._is_stuck or time.monotonic() > ends_s:
                    self._report_stuck()
                    return
                # The kernel does not report when another process releases its lock: yield, then poll less often.
                time.sleep(0.0 if tries < _SPINS else _PAUSE_S)
            else:
                self._is_locked, self._is_stuck = True, False
                return

    def unlock(self) -> None:
        """Release the lock, if it is held."""
        if self._is_locked:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)
        self._is_locked = False

    def load(self, tag: bytes, usage: LimitUsage) -> None:
        """Read a record into `usage`. The caller holds the lock, unless `lock` gave up."""
        values = _BUCKETS.unpack_from(self._map, self._record_at[tag] + _BUCKETS_AT)
        usage.requests, usage.tokens = _bucket(*values[:3]), _bucket(*values[3:])
        self.load_beside(tag, usage)

    def load_beside(self, tag: bytes, usage: LimitUsage) -> None:
        """Read the other processes' requests in flight."""
        self._read_header()
        inflight = self._columns.unpack_from(self._map, self._record_at[tag] + _COLUMNS_AT)
        usage.num_inflight_beside = sum(inflight) - inflight[self._column]

    def store(self, tag: bytes, usage: LimitUsage) -> None:
        """Write the buckets, and this process's requests in flight. The caller holds the lock, as for `load`."""
        values = (*_values(usage.requests), *_values(usage.tokens))
        _BUCKETS.pack_into(self._map, self._record_at[tag] + _BUCKETS_AT, *values)
        self.store_inflight(tag, usage.num_inflight)

    def store_inflight(self, tag: bytes, num_inflight: int) -> None:
        """Write this process's requests in flight, which needs no lock."""
        _NUM_INFLIGHT.pack_into(self._map, self._inflight_at(self._record_at[tag]), num_inflight)

    def drop_ended_processes(self) -> None:
        """Clear the columns of processes that have died. The caller holds the lock."""
        for column in range(self._num_columns):
            is_counted = not self._incarnation(column) & _ENDED
            if is_counted and column != self._column and not self._is_alive(column):
                self._drop(column)

    def record(self, tag: bytes) -> int:
        """Offset of a tenant's record; a new one is appended. The caller holds the lock.

        Raises OSError when there is no room.
        """
        self.read_records()
        if (found := self._record_at.get(tag)) is not None:
            return found
        num_columns, num_records = _COUNTS.unpack_from(self._map, 0)
        if num_records == _MAX_RECORDS:
            raise OSError(f"more than {_MAX_RECORDS} tenants have limits")
        at: int = _RECORDS_AT + num_records * _RECORD_BYTES
        self._claim(at + _RECORD_BYTES)
        self._map[at : at + TAG_BYTES] = tag
        _COUNTS.pack_into(self._map, 0, num_columns, num_records + 1)
        self._record_at[tag] = at
        self._num_read += 1
        return at

    def read_records(self) -> None:
        """Index the records that other processes have appended. The caller holds the lock."""
        _, num_records = _COUNTS.unpack_from(self._map, 0)
        for number in range(self._num_read, num_records):
            at = _RECORDS_AT + number * _RECORD_BYTES
            self._record_at[self._map[at : at + TAG_BYTES]] = at
        self._num_read = num_records

    def _map_file(self) -> mmap.mmap:
        if not any(map(self._is_alive, range(_MAX_COLUMNS))):
            os.ftruncate(self._descriptor, 0)  # left over from ended processes
        self._claim(_RECORDS_AT)
        os.ftruncate(self._descriptor, _FILE_BYTES)
        return mmap.mmap(self._descriptor, _FILE_BYTES)

    def _drop(self, column: int) -> None:
        self._clear_column(column)
        at = _INCARNATIONS_AT + column * _INCARNATION.size
        _INCARNATION.pack_into(self._map, at, self._incarnation(column) | _ENDED)

    def _clear_column(self, column: int) -> None:
        _, num_records = _COUNTS.unpack_from(self._map, 0)
        for number in range(num_records):
            at = _RECORDS_AT + number * _RECORD_BYTES + _COLUMNS_AT + column * _NUM_INFLIGHT.size
            _NUM_INFLIGHT.pack_into(self._map, at, 0)

    def _take_column(self) -> int:
        """Lock the byte of a free column for this process's lifetime, and return the column."""
        for column in range(_MAX_COLUMNS):
            if self._lock_byte(column):
                num_columns, num_records = _COUNTS.unpack_from(self._map, 0)
                _COUNTS.pack_into(self._map, 0, max(num_columns, column + 1), num_records)
                return column
        raise OSError(f"{self._path}: more than {_MAX_COLUMNS} router processes share one host")

    def _lock_byte(self, column: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + column)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_alive(self, column: int) -> bool:
        """Whether another live process has the column."""
        if not self._lock_byte(column):
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 1 + column)
        return False

    @property
    def _num_columns(self) -> int:
        return self._columns.size // _NUM_INFLIGHT.size

    def _inflight_at(self, record_at: int) -> int:
        return record_at + _COLUMNS_AT + self._column * _NUM_INFLIGHT.size

    def _read_header(self) -> None:
        num_columns, _ = _COUNTS.unpack_from(self._map, 0)
        if num_columns != self._num_columns:
            self._columns = struct.Struct(f"<{num_columns}I")

    def _incarnation(self, column: int) -> int:
        at = _INCARNATIONS_AT + column * _INCARNATION.size
        return int.from_bytes(self._map[at : at + _INCARNATION.size], "little")

    def _claim(self, size_bytes: int) -> None:
        if size_bytes > self._claimed_bytes:
            claimed = -(-size_bytes // _CHUNK_BYTES) * _CHUNK_BYTES
            try:
                os.posix_fallocate(self._descriptor, 0, claimed)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self._claimed_bytes = claimed

    def _report_stuck(self) -> None:
        if not self._is_stuck:
            _log.error(
                "%s has been locked for %g s by a router process that is not running: requests are counted without the "
                "lock until it is free",
                self._path.name,
                _LONGEST_LOCK_S,
            )
        self._is_stuck = True


def _bucket(per_minute: float, level: float, seen_s: float) -> TokenBucket | None:
    return TokenBucket(per_minute=per_minute, level=level, seen_s=seen_s) if per_minute else None


def _emptier(one: TokenBucket | None, other: TokenBucket | None) -> TokenBucket | None:
    """The emptier of two buckets of one limit; `other` if they are of different limits."""
    if one is None or other is None or one.per_minute != other.per_minute:
        return other or one
    latest_s = max(one.seen_s, other.seen_s)
    return min((bucket.resized(bucket.per_minute, latest_s) for bucket in (one, other)), key=lambda it: it.level)


def _values(bucket: TokenBucket | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if bucket is None else (bucket.per_minute, bucket.level, bucket.seen_s)
