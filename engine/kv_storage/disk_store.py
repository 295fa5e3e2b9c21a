"""Files of blocks and the threads that write and read them: the shell of `engine.kv_cache.tiers.disk`.

One folder belongs to one process, which holds a lock on it: several workers of one machine share a path, and each takes
a folder in it that nobody holds, the first with blocks like its own or else the first. What an earlier process left
there is found at start: file by file, header and length are checked, and the content when it is read. Half-written and
foreign files are removed, others than ours left alone. One thread writes and removes, in order; others read, so that
nobody who waits waits for a write.

Nothing is forced to the disk: what a power failure loses was a cache, and what it damages is found by its checksum.
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
    """What a block takes on disk."""
    return -(-(HEADER_BYTES + block_bytes) // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an earlier process left."""

    names: tuple[BlockHash, ...]
    """Least recently used first."""
    num_removed: int
    """Files that were damaged, half-written, of another cache, or more than there is room for."""


def check_path(path: Path) -> None:
    """Before a model is loaded: raises ConfigError where no cache can be kept. Makes the folder if it is not there."""
    try:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"engine.disk_cache_path: {path}: {error.strerror}") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"engine.disk_cache_path: {path}: {os.strerror(errno.EACCES)}")


class DiskStore:
    """See DiskPort. Calls come from the engine's thread, and the places are handed to the threads here meanwhile."""

    def __init__(self, path: Path, *, identity: CacheIdentity, place: Callable[[int], memoryview]) -> None:
        """`path`: of the cache, made if it is not there; `place` gives the bytes of a place in host memory.

        Raises ConfigError when nothing can be kept there, or others than the owner could read it.
        """
        self._identity = identity
        self._place = place
        self._lock_fd, self.folder = _claim(path, identity)
        self._done: SimpleQueue[DiskDone] = SimpleQueue()
        self._on_read: Callable[[], None] = _nothing
        self._is_failing = False
        """The last write was refused; the writing thread's."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tandem-disk-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="tandem-disk-read")

    def find(self, capacity: int) -> Found:
        """Look through the folder, and clean it; once, before anything else."""
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
        """Call `on_read`, on one of the disk's threads, after every read."""
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
            # A disk that is full stays full for a while: once is enough.
            _log.log(logging.DEBUG if self._is_failing else logging.WARNING, "blocks are not kept: %s", error.strerror)
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
    """Lock a folder of the path that nobody holds. Raises ConfigError."""
    try:
        # Workers of unlike pools start in any order, and whatever is not a folder's owner's is thrown away.
        for numbers in (_marked(path, identity), range(_MAX_FOLDERS)):
            for number in numbers:
                folder = path / str(number)
                if (fd := _lock(folder)) is not None:
                    with suppress(OSError):  # of a full disk: then it is only not found first
                        os.pwrite(fd, identity.digest, 0)
                    return fd, folder
    except OSError as error:
        raise ConfigError(f"engine.disk_cache_path: {path}: {error.strerror}") from None
    raise ConfigError(f"engine.disk_cache_path: {path} is in use by {_MAX_FOLDERS} workers")


def _marked(path: Path, identity: CacheIdentity) -> Sequence[int]:
    """Folders whose last owner kept such blocks; a lock says whose it is."""
    found: list[int] = []
    for number in range(_MAX_FOLDERS):
        with suppress(OSError):
            if (path / str(number) / _LOCK).read_bytes() == identity.digest:
                found.append(number)
    return found


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder, which is made if it is not there; None when another process has it.

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
    """Every file that is called as ours are, with the block it is called after: None for one that was not finished."""
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
    """So that the order of use outlives the process."""
    try:
        os.utime(path)
    except OSError:
        return


def _nothing() -> None:
    """Default listener: nothing is notified."""
