"""Files of blocks and the threads that write and read them: the I/O behind `engine.kv_cache.tiers.disk`.

One folder belongs to one process, which holds a lock on it: several workers of one machine share a path, and each takes
an unlocked folder in it, the first with blocks like its own or else the first. The files of an earlier process are
found at start: header and length of each are checked then, the content when it is read. Unfinished and damaged blocks,
and those of another cache, are removed; files with other names are left alone. One thread writes and removes, in order;
others read, so that no read waits for a write.

Nothing is forced to the disk: a power failure loses only cached blocks, and a checksum reveals those that it damages.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter

from engine.kv_cache.tiers.disk_index import DiskDone, DiskJob, DiskVerdict
from engine.kv_storage.block_file import (
    HEADER_BYTES,
    SUFFIX,
    TEMPORARY_SUFFIX,
    BadBlockFile,
    CacheIdentity,
    check_file,
    file_name,
    name_of,
    read_block,
    remove,
    write_block,
)
from tandem.errors import ConfigError
from tandem.values.ids import BlockHash

_log = logging.getLogger(__name__)
_FOLDER_MODE = 0o700
_LOCK = "lock"
_MAX_FOLDERS = 64
_NUM_READERS = 2
_FILE_SYSTEM_BLOCK = 4096


def file_bytes(block_bytes: int) -> int:
    """Bytes that a block of `block_bytes` bytes occupies on disk."""
    return -(-(HEADER_BYTES + block_bytes) // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Blocks of an earlier process."""

    names: tuple[BlockHash, ...]
    """Names, least recently used first."""
    num_removed: int
    """Files removed: damaged, unfinished, of another cache, or in excess of the capacity."""


def check_path(path: Path) -> None:
    """Make the cache's folder if it does not exist. Raises ConfigError where no cache can be kept; needs no model."""
    try:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"engine.disk_cache_path: {path}: {error.strerror}") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"engine.disk_cache_path: {path}: {os.strerror(errno.EACCES)}")


class DiskStore:
    """Implements DiskPort. The engine's thread calls; the threads here use the places that it hands over."""

    def __init__(self, path: Path, *, identity: CacheIdentity, place: Callable[[int], memoryview]) -> None:
        """`path`: the cache's folder, made if it does not exist; `place` gives the bytes of a place in host memory.

        Raises ConfigError when the folder cannot be used, or others than the owner could read it.
        """
        self._identity = identity
        self._place = place
        self._lock_fd, self.folder = _claim(path, identity)
        self._done: SimpleQueue[DiskDone] = SimpleQueue()
        self._on_read: Callable[[], None] = _nothing
        self._is_failing = False
        """True when the last write failed; used by the writing thread alone."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tandem-disk-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="tandem-disk-read")

    def find(self, capacity: int) -> Found:
        """List the folder's blocks, at most `capacity`, and remove unusable files. Call it once, before anything
        else.
        """
        used: list[tuple[float, BlockHash]] = []
        num_removed = 0
        for path, name in _files(self.folder):
            try:
                if name is None:
                    raise BadBlockFile("it was never finished")
                used.append((check_file(path, name=name, identity=self._identity), name))
            except (OSError, BadBlockFile):
                num_removed += 1
                remove(path)
        used.sort()
        surplus = max(0, len(used) - capacity)
        for _, name in used[:surplus]:
            remove(self._path(name))
        return Found(names=tuple(name for _, name in used[surplus:]), num_removed=num_removed + surplus)

    def listen(self, on_read: Callable[[], None]) -> None:
        """Call `on_read` after every read, on one of the disk's threads."""
        self._on_read = on_read

    def write(self, name: BlockHash, slot: int) -> None:
        self._writer.submit(self._write, name, slot)

    def read(self, name: BlockHash, slot: int) -> None:
        self._readers.submit(self._read, name, slot)

    def delete(self, name: BlockHash) -> None:
        self._writer.submit(remove, self._path(name))

    def collect(self) -> Sequence[DiskDone]:
        done: list[DiskDone] = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    def wait_writes(self, timeout_s: float) -> None:
        """Wait until all writes submitted so far are done, at most `timeout_s`."""
        wait([self._writer.submit(_nothing)], timeout=timeout_s)

    def close(self) -> None:
        """Finish the running jobs and cancel the queued ones. May be called twice."""
        for threads in (self._readers, self._writer):
            threads.shutdown(cancel_futures=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _path(self, name: BlockHash) -> str:
        return f"{self.folder}/{file_name(name)}"

    def _write(self, name: BlockHash, slot: int) -> None:
        path, started_s = self._path(name), perf_counter()
        verdict = DiskVerdict.DONE
        try:
            with suppress(FileExistsError):
                # Never the folder itself: if it was removed, the lock on it is gone, too.
                os.mkdir(os.path.dirname(path), mode=_FOLDER_MODE)
            write_block(path, self._place(slot), name=name, identity=self._identity)
        except OSError as error:
            # A full disk stays full for a while: warn once.
            level = logging.DEBUG if self._is_failing else logging.WARNING
            _log.log(level, "cannot write a block to the disk cache: %s", error.strerror)
            verdict = DiskVerdict.FAILED
        self._is_failing = verdict is DiskVerdict.FAILED
        self._end(DiskJob.WRITE, name, slot, verdict, perf_counter() - started_s)

    def _read(self, name: BlockHash, slot: int) -> None:
        path, started_s = self._path(name), perf_counter()
        verdict = DiskVerdict.DONE
        try:
            read_block(path, self._place(slot), name=name, identity=self._identity)
        except FileNotFoundError:
            verdict = DiskVerdict.GONE
        except OSError as error:
            _log.warning("cannot read a cached block: %s", error.strerror)
            verdict = DiskVerdict.FAILED
        except BadBlockFile as bad:
            _log.warning("ignoring a cached block: %s", bad)
            verdict = DiskVerdict.DAMAGED
        self._end(DiskJob.READ, name, slot, verdict, perf_counter() - started_s)
        self._on_read()
        if verdict is DiskVerdict.DONE:
            _mark_used(path)

    def _end(self, job: DiskJob, name: BlockHash, slot: int, verdict: DiskVerdict, seconds: float) -> None:
        num_bytes = self._identity.block_bytes if verdict is DiskVerdict.DONE else 0
        self._done.put(DiskDone(job=job, name=name, slot=slot, verdict=verdict, num_bytes=num_bytes, seconds=seconds))


def _claim(path: Path, identity: CacheIdentity) -> tuple[int, Path]:
    """Lock a free folder of the path, whose number is its name. Returns descriptor and folder. Raises ConfigError."""
    try:
        # A folder's new owner removes the blocks of other caches, so one with blocks like its own is tried first.
        for numbers in (_marked(path, identity), range(_MAX_FOLDERS)):
            for number in numbers:
                folder = path / str(number)
                if (fd := _lock(folder)) is not None:
                    with suppress(OSError):  # on a full disk the folder stays unmarked, and is tried later
                        os.pwrite(fd, identity.digest, 0)
                    return fd, folder
    except OSError as error:
        raise ConfigError(f"engine.disk_cache_path: {path}: {error.strerror}") from None
    raise ConfigError(f"engine.disk_cache_path: {path} is in use by {_MAX_FOLDERS} workers")


def _marked(path: Path, identity: CacheIdentity) -> Sequence[int]:
    """Numbers of the folders whose last owner kept blocks of this cache, as their lock files say."""
    found: list[int] = []
    for number in range(_MAX_FOLDERS):
        with suppress(OSError):
            if (path / str(number) / _LOCK).read_bytes() == identity.digest:
                found.append(number)
    return found


def _lock(folder: Path) -> int | None:
    """Lock a folder, which is made if it does not exist. Returns a descriptor; None when another process has it.

    Raises OSError, and ConfigError when others than the owner could open it.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ConfigError(f"engine.disk_cache_path: {folder} must be a folder that only its owner can open")
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _files(folder: Path) -> Iterator[tuple[str, BlockHash | None]]:
    """All files named like blocks, each with its block's name; None for an unfinished one."""
    for inner in sorted(os.listdir(folder)):
        where = f"{folder}/{inner}"
        if len(inner) != 2 or os.path.islink(where) or not os.path.isdir(where):
            continue
        for file in os.listdir(where):
            name = name_of(inner, file)
            stem = file.removesuffix(TEMPORARY_SUFFIX)
            if name is not None:
                yield f"{where}/{file}", name
            elif stem != file and name_of(inner, stem + SUFFIX) is not None:
                yield f"{where}/{file}", None


def _mark_used(path: str) -> None:
    """Set the file's time of use, so that the order of use outlives the process."""
    try:
        os.utime(path)
    except OSError:
        return


def _nothing() -> None:
    """Default listener; also an empty job, to wait for those before it."""
