"""Accounts of rate limits shared by the router processes of one host: exact, and owned by no single process.

A file in a folder that only their user can enter is mapped into each of them. A lock on its first byte is held for the
few microseconds in which a request is counted; a lock on another byte marks a process as alive. The kernel releases
both when it dies, however that happens. Each process counts its requests in flight in a column of its own, which the
others read, so that those of a process that has died can be dropped.

    header:  number of columns in use · number of records · a router incarnation for each column
    record:  tenant tag · requests bucket · tokens bucket · requests in flight for each column
"""

import fcntl
import logging
import mmap
import os
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from router.admission.rate_limits import LimitUsage, TokenBucket
from tandem.cluster_state.entries import TAG_BYTES
from tandem.errors import InvariantError
from tandem.values.ids import Incarnation

_FILE: Final = "rate-limits-1"
"""File name with the version of the layout: versions with another layout use another file."""
_MAX_COLUMNS: Final = 128
"""At least twice `router.processes`: while all are replaced, there are those that drain and those that start."""
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
"""Disk space is claimed in such chunks: writing to memory that is mapped to a file on a full disk kills the process."""
_ENDED: Final = 1 << 63
"""Set in the incarnation of a process that has died, once its requests were dropped."""
_SPINS: Final = 50
_PAUSE_S: Final = 50e-6
_LONGEST_LOCK_S: Final = 1.0
"""Longest wait for a process that was stopped while it held the lock; requests are then counted without it."""
_log = logging.getLogger(__name__)


class RateLimitFile:
    """One process's view of the file; a context manager. One per process, since the kernel's locks belong to the
    process."""

    def __init__(self, folder: Path, *, router: Incarnation) -> None:
        """`router`: the incarnation by which routers on other hosts know this process."""
        self._path = folder / _FILE
        self._router = router
        self._descriptor: int | None = None
        self._map: mmap.mmap | None = None
        self._column = 0
        self._columns = struct.Struct("")
        self._record_at: dict[bytes, int] = {}
        self._num_read = 0
        self._claimed_bytes = 0
        self._is_locked = False
        self._is_stuck = False

    def __enter__(self) -> Self:
        """Open and map the file. Raises OSError when the folder is not writable."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = descriptor = os.open(self._path, flags, 0o600)
        self.lock()
        try:
            self._map_file(descriptor)
            self._column = self._take_column()
            self._read_header()
            self._clear_column(self._column)
            _INCARNATION.pack_into(self._mapped, _INCARNATIONS_AT + self._column * _INCARNATION.size, self._router)
        except BaseException:
            os.close(descriptor)  # which releases all locks
            self._map = self._descriptor = None
            raise
        finally:
            self.unlock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._map is not None and self._descriptor is not None:
            self.lock()
            self._drop(self._column)
            self._map.close()
            os.close(self._descriptor)  # which releases all locks
            self._map = self._descriptor = None

    def usage_of(self, tag: bytes) -> LimitUsage:
        """Return the account of the tenant with this tag: shared by all processes or, where there is no room,
        private."""
        self.lock()
        try:
            return HostLimitUsage(self, self._record(tag))
        except OSError as error:
            _log.error("%s: %s; a tenant's limits hold for each router process alone", self._path.name, error)
            return LimitUsage()
        finally:
            self.unlock()

    def routers(self) -> frozenset[Incarnation]:
        """Incarnations of this host's router processes: the live ones, and dead ones whose columns were not reused."""
        if self._map is None:
            return frozenset((self._router,))
        self._read_header()
        found = (self._incarnation(column) & ~_ENDED for column in range(self._columns.size // _NUM_INFLIGHT.size))
        return frozenset(map(Incarnation, found))

    def is_first(self) -> bool:
        """Whether this is the first live process: the one that counts what other hosts admit."""
        return not any(map(self._is_alive, range(self._column)))

    def lock(self) -> None:
        """Lock the account. Blocks for microseconds: holders only do arithmetic.

        Only if its holder was stopped does this block the event loop longer, once, for at most `_LONGEST_LOCK_S`.
        """
        descriptor, ends_s, tries = self._descriptor, 0.0, 0
        while descriptor is not None:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except (BlockingIOError, PermissionError):
                tries += 1
                ends_s = ends_s or time.monotonic() + _LONGEST_LOCK_S
                if self._is_stuck or time.monotonic() > ends_s:
                    self._report_stuck()
                    return
                # The kernel sends no notice when another process's lock is free: yield, then check less often.
                time.sleep(0.0 if tries < _SPINS else _PAUSE_S)
            else:
                self._is_locked, self._is_stuck = True, False
                return

    def unlock(self) -> None:
        """Unlock the account after `lock`."""
        if self._is_locked and self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)
        self._is_locked = False

    def load(self, at: int, usage: LimitUsage) -> None:
        """Read a record into `usage`. The caller holds the lock, unless it could not be had."""
        if self._map is None:
            return
        values = _BUCKETS.unpack_from(self._map, at + _BUCKETS_AT)
        usage.requests, usage.tokens = _bucket(*values[:3]), _bucket(*values[3:])
        self.load_beside(at, usage)

    def load_beside(self, at: int, usage: LimitUsage) -> None:
        """Read the other processes' requests in flight."""
        self._read_header()
        inflight = self._columns.unpack_from(self._mapped, at + _COLUMNS_AT)
        usage.num_inflight_beside = sum(inflight) - inflight[self._column]

    def store(self, at: int, usage: LimitUsage) -> None:
        """Write the buckets, and this process's requests in flight. The caller holds the lock, as for `load`."""
        if self._map is not None:
            values = (*_values(usage.requests), *_values(usage.tokens))
            _BUCKETS.pack_into(self._map, at + _BUCKETS_AT, *values)
            self.store_inflight(at, usage.num_inflight)

    def store_inflight(self, at: int, num_inflight: int) -> None:
        """Write this process's requests in flight, which needs no lock."""
        if self._map is not None:
            _NUM_INFLIGHT.pack_into(self._map, at + _COLUMNS_AT + self._column * _NUM_INFLIGHT.size, num_inflight)

    def drop_ended_processes(self) -> None:
        """Clear the columns of processes that have died. The caller holds the lock."""
        for column in range(self._columns.size // _NUM_INFLIGHT.size):
            is_counted = not self._incarnation(column) & _ENDED
            if is_counted and column != self._column and not self._is_alive(column):
                self._drop(column)

    def _map_file(self, descriptor: int) -> None:
        if not any(map(self._is_alive, range(_MAX_COLUMNS))):
            os.ftruncate(descriptor, 0)  # of earlier processes
        self._claim(_RECORDS_AT)
        os.ftruncate(descriptor, _FILE_BYTES)
        self._map = mmap.mmap(descriptor, _FILE_BYTES)

    def _drop(self, column: int) -> None:
        self._clear_column(column)
        at = _INCARNATIONS_AT + column * _INCARNATION.size
        _INCARNATION.pack_into(self._mapped, at, self._incarnation(column) | _ENDED)

    def _clear_column(self, column: int) -> None:
        _, num_records = _COUNTS.unpack_from(self._mapped, 0)
        for number in range(num_records):
            at = _RECORDS_AT + number * _RECORD_BYTES + _COLUMNS_AT + column * _NUM_INFLIGHT.size
            _NUM_INFLIGHT.pack_into(self._mapped, at, 0)

    def _take_column(self) -> int:
        """Lock the byte of a column that no live process has, for as long as this process lives."""
        for column in range(_MAX_COLUMNS):
            if self._lock_byte(column):
                num_columns, num_records = _COUNTS.unpack_from(self._mapped, 0)
                _COUNTS.pack_into(self._mapped, 0, max(num_columns, column + 1), num_records)
                return column
        raise OSError(f"{self._path.name}: more than {_MAX_COLUMNS} router processes share one host")

    def _lock_byte(self, column: int) -> bool:
        try:
            fcntl.lockf(self._open, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + column)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_alive(self, column: int) -> bool:
        """Whether another live process has the column."""
        if not self._lock_byte(column):
            return True
        fcntl.lockf(self._open, fcntl.LOCK_UN, 1, 1 + column)
        return False

    def _read_header(self) -> None:
        num_columns, _ = _COUNTS.unpack_from(self._mapped, 0)
        if num_columns * _NUM_INFLIGHT.size != self._columns.size:
            self._columns = struct.Struct(f"<{num_columns}I")

    def _incarnation(self, column: int) -> int:
        at = _INCARNATIONS_AT + column * _INCARNATION.size
        return int.from_bytes(self._mapped[at : at + _INCARNATION.size], "little")

    def _record(self, tag: bytes) -> int:
        """Return the offset of a tenant's record, appending a new one. Raises OSError when there is no room."""
        num_records: int
        num_columns, num_records = _COUNTS.unpack_from(self._mapped, 0)
        for number in range(self._num_read, num_records):
            at = _RECORDS_AT + number * _RECORD_BYTES
            self._record_at[self._mapped[at : at + TAG_BYTES]] = at
        self._num_read = num_records
        if (found := self._record_at.get(tag)) is not None:
            return found
        if num_records == _MAX_RECORDS:
            raise OSError(f"more than {_MAX_RECORDS} tenants have limits")
        at = _RECORDS_AT + num_records * _RECORD_BYTES
        self._claim(at + _RECORD_BYTES)
        self._mapped[at : at + TAG_BYTES] = tag
        _COUNTS.pack_into(self._mapped, 0, num_columns, num_records + 1)
        self._record_at[tag] = at
        self._num_read += 1
        return at

    def _claim(self, size_bytes: int) -> None:
        if size_bytes > self._claimed_bytes:
            claimed = -(-size_bytes // _CHUNK_BYTES) * _CHUNK_BYTES
            os.posix_fallocate(self._open, 0, claimed)
            self._claimed_bytes = claimed

    def _report_stuck(self) -> None:
        if not self._is_stuck:
            _log.error(
                "%s has been locked for %g s by a router process that does not run: requests are counted without the "
                "lock until it is free",
                self._path.name,
                _LONGEST_LOCK_S,
            )
        self._is_stuck = True

    @property
    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise InvariantError("the account of rate limits is not open")
        return self._map

    @property
    def _open(self) -> int:
        if self._descriptor is None:
            raise InvariantError("the account of rate limits is not open")
        return self._descriptor


class HostLimitUsage(LimitUsage):
    """The usage of one tenant by all router processes of the host."""

    __slots__ = ("_at", "_file")

    def __init__(self, file: RateLimitFile, at: int) -> None:
        super().__init__()
        self._file = file
        self._at = at

    def __enter__(self) -> Self:
        self._file.lock()
        self._file.load(self._at, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.store(self._at, self)
        self._file.unlock()

    def drop_ended_processes(self) -> None:
        self._file.drop_ended_processes()
        self._file.load_beside(self._at, self)

    def release(self) -> None:
        self.num_inflight -= 1
        self._file.store_inflight(self._at, self.num_inflight)


def _bucket(per_minute: float, level: float, seen_s: float) -> TokenBucket | None:
    return TokenBucket(per_minute=per_minute, level=level, seen_s=seen_s) if per_minute else None


def _values(bucket: TokenBucket | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if bucket is None else (bucket.per_minute, bucket.level, bucket.seen_s)
