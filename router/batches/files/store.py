"""Files and batches on disk, by tenant. Blocking: for threads, or for moments.

A batch is one JSON file that is replaced as a whole, beside the results so far, one line each: what has a line is never
run again. A torn last line, of a process that died, is cut off. Cancelling is a file of its own, so that any router
process may ask for it.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import orjson

from router.batches.files.lines import number_of
from router.batches.files.private_files import FOLDER, close_to_others, make_private, open_private
from router.batches.files.types import ObjectNotFound, StoredBatch, StoredFile
from tandem.errors import ConfigError, Overloaded

_FILE_ID = re.compile(r"file-[0-9a-f]{32}(-output|-errors)?")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_INCOMING, _UPLOADS, _TENANTS = "incoming", "uploads", "tenants"
_BATCHES = f"{_TENANTS}/*/batches/*/batch.json"
OUTPUT, ERRORS = "output", "errors"
_UPLOAD_S = 3600.0
"""Longer than any upload may take."""
MOST_FILES = 10_000
"""Of one tenant, however small they are."""
MOST_UPLOADS = 16
MOST_UPLOADS_OF_TENANT = 4
"""On their way at once to all processes, and those of one tenant: each may take twice a file's largest size of disk."""
MOST_ENDED = 1_000
"""Batches of one tenant that are remembered once they have ended."""
_log = logging.getLogger(__name__)


class BatchStore:
    """One folder."""

    def __init__(self, folder: Path, *, max_tenant_bytes: int, keep_s: float) -> None:
        self._folder = folder
        self._max_tenant_bytes = max_tenant_bytes
        self._keep_s = keep_s
        self._lock: IO[bytes] | None = None
        # What has ended stays so: looking for work does not read it again. Touched by one thread at a time.
        self._ended: set[Path] = set()

    def open(self) -> None:
        """Make the folder. Raises ConfigError when it cannot be."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=FOLDER)
            make_private(self._folder / _INCOMING)
            for name in (_INCOMING, _UPLOADS, _TENANTS):
                close_to_others(self._folder / name)
        except OSError as error:
            raise ConfigError(f"router.batches.path: {self._folder}: {error.strerror}") from None

    def may_run(self) -> bool:
        """Whether this process is the one that runs batches: the first that asks, until its end."""
        if self._lock is None:
            lock = open_private(self._folder / "lock", "ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            self._lock = lock
        return True

    def close(self) -> None:
        """Another process may run batches now."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Files

    def incoming(self) -> Path:
        """A path for what is being uploaded."""
        return self._folder / _INCOMING / secrets.token_hex(16)

    def begin_upload(self, tenant: str) -> ExitStack:
        """A place for what is about to be uploaded, to be closed. Raises Overloaded when all are taken."""
        of_tenant = UploadSlots(self._of(tenant, _UPLOADS), MOST_UPLOADS_OF_TENANT)
        place = acquire_all(of_tenant, UploadSlots(self._folder / _UPLOADS, MOST_UPLOADS))
        if place is None:
            raise Overloaded("too many files are on their way", retry_after_s=1.0)
        return place

    def add_file(self, tenant: str, content: Path, *, filename: str, purpose: str, now_s: float) -> StoredFile:
        """Take a finished upload over. Raises Overloaded when the tenant has too much."""
        size = content.stat().st_size
        # Uploads that end at once, in whatever process, must not all see the same room.
        with exclusive(self._of(tenant, "files")):
            files = self.files(tenant)
            held = sum(file.num_bytes for file in files)
            if held + size > self._max_tenant_bytes:
                raise Overloaded(f"files take {held} bytes, at most {self._max_tenant_bytes}: delete some")
            if len(files) >= MOST_FILES:
                raise Overloaded(f"there are {len(files)} files, at most {MOST_FILES}: delete some")
            return self._take(tenant, f"file-{secrets.token_hex(16)}", content, filename, purpose, now_s)

    def _take(self, tenant: str, name: str, content: Path, filename: str, purpose: str, now_s: float) -> StoredFile:
        file = StoredFile(
            id=name,
            filename=filename,
            purpose=purpose,
            num_bytes=content.stat().st_size,
            created_s=int(now_s),
            expires_s=int(now_s + self._keep_s),
        )
        told = self._of(tenant, "files") / f"{name}.json"
        # Before its content: where the disk is full there, or the process ends, nothing is left that has no end.
        _write(
            told, {"filename": filename, "purpose": purpose, "created_s": file.created_s, "expires_s": file.expires_s}
        )
        content.replace(told.with_suffix(".data"))
        return file

    def file(self, tenant: str, name: str) -> StoredFile:
        """Raises ObjectNotFound."""
        folder = self._of(tenant, "files")
        if _FILE_ID.fullmatch(name):
            told = _told(folder / f"{name}.json")
            with suppress(FileNotFoundError, TypeError):
                if told is not None:
                    return StoredFile(id=name, num_bytes=(folder / f"{name}.data").stat().st_size, **told)
        raise ObjectNotFound(f"no file {name[:100]!r}", param="file_id")

    def content(self, tenant: str, name: str) -> Path:
        """Where it is. Raises ObjectNotFound."""
        return self._of(tenant, "files") / f"{self.file(tenant, name).id}.data"

    def files(self, tenant: str) -> list[StoredFile]:
        """The newest first."""
        found = []
        for path in self._of(tenant, "files").glob("file-*.json"):
            with suppress(ObjectNotFound):  # deleted since it was listed
                found.append(self.file(tenant, path.stem))
        return sorted(found, key=lambda file: (-file.created_s, file.id))

    def delete_file(self, tenant: str, name: str) -> None:
        """Raises ObjectNotFound."""
        path = self.content(tenant, name)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    # Batches

    def add_batch(self, batch: StoredBatch, *, most: int) -> None:
        """A new one. Raises Overloaded when `most` of the tenant's have not ended."""
        # As with files.
        with exclusive(self._of(batch.tenant, "batches")):
            live = sum(not one.status.is_final for one in self.batches(batch.tenant))
            if live >= most:
                raise Overloaded(f"{live} batches have not ended, at most {most}", retry_after_s=60.0)
            try:
                self.save(batch)
            except OSError:
                shutil.rmtree(self._of(batch.tenant, "batches") / batch.id, ignore_errors=True)
                raise

    def save(self, batch: StoredBatch) -> None:
        """As it is now."""
        folder = self._of(batch.tenant, "batches") / batch.id
        make_private(folder)
        _write(folder / "batch.json", batch.to_json())

    def batch(self, tenant: str, name: str) -> StoredBatch:
        """Raises ObjectNotFound."""
        if _BATCH_ID.fullmatch(name):
            batch = _batch(self._of(tenant, "batches") / name / "batch.json")
            if batch is not None:
                return batch
        raise ObjectNotFound(f"no batch {name[:100]!r}", param="batch_id")

    def batches(self, tenant: str) -> list[StoredBatch]:
        """The newest first."""
        found = [batch for _, batch in _batches(self._of(tenant, "batches"), "*/batch.json")]
        return sorted(found, key=lambda batch: (-batch.created_s, batch.id))

    def live(self) -> list[StoredBatch]:
        """Of all tenants those that have not ended, the oldest first."""
        live, ended = [], set()
        for path in self._folder.glob(_BATCHES):
            if path in self._ended:
                ended.add(path)
            elif (batch := _batch(path)) is not None:
                if batch.status.is_final:
                    ended.add(path)
                else:
                    live.append(batch)
        self._ended = ended
        return sorted(live, key=lambda batch: (batch.created_s, batch.id))

    def cancel(self, batch: StoredBatch) -> None:
        """Ask for it."""
        open_private(self._mark(batch), "ab").close()

    def is_cancelled(self, batch: StoredBatch) -> bool:
        """Whether somebody asked for it."""
        return self._mark(batch).exists()

    def _mark(self, batch: StoredBatch) -> Path:
        return self._of(batch.tenant, "batches") / batch.id / "cancel"

    def results(self, batch: StoredBatch) -> "Results":
        """What there is so far."""
        return Results(self._of(batch.tenant, "batches") / batch.id)

    def publish(self, batch: StoredBatch, now_s: float) -> tuple[str | None, str | None]:
        """Make files of the results; which those are. Once done it stays done."""
        folder, names = self._of(batch.tenant, "batches") / batch.id, []
        for kind in (OUTPUT, ERRORS):
            name, path = f"file-{batch.id.removeprefix('batch_')}-{kind}", folder / f"{kind}.jsonl"
            if path.exists() and path.stat().st_size:
                self._take(batch.tenant, name, path, f"{batch.id}_{kind}.jsonl", "batch_output", now_s)
            is_there = (self._of(batch.tenant, "files") / f"{name}.data").exists()
            names.append(name if is_there else None)
        return names[0], names[1]

    def sweep(self, now_s: float) -> None:
        """Delete what has been kept long enough, and uploads that were never finished."""
        for path in self._folder.glob(f"{_TENANTS}/*/files/file-*.json"):
            told = _told(path)
            if told is not None and told.get("expires_s", now_s + 1) <= now_s:
                path.unlink(missing_ok=True)
                path.with_suffix(".data").unlink(missing_ok=True)
        num_ended: Counter[str] = Counter()
        found = sorted(_batches(self._folder, _BATCHES), key=lambda one: -one[1].created_s)
        for path, batch in found:
            if batch.status.is_final:
                num_ended[batch.tenant] += 1
                if batch.created_s + self._keep_s <= now_s or num_ended[batch.tenant] > MOST_ENDED:
                    shutil.rmtree(path.parent, ignore_errors=True)
        for path in (self._folder / _INCOMING).iterdir():
            with suppress(FileNotFoundError):  # its upload has just ended
                if path.stat().st_mtime + _UPLOAD_S <= now_s:
                    path.unlink(missing_ok=True)

    def _of(self, tenant: str, kind: str) -> Path:
        # A tenant's name may have any characters.
        name = blake2b(tenant.encode(), digest_size=16, person=b"tandem-batches").hexdigest()
        folder = self._folder / _TENANTS / name / kind
        make_private(folder)
        return folder


class Results:
    """The lines of one batch's answers."""

    def __init__(self, folder: Path) -> None:
        self._paths = {False: folder / f"{OUTPUT}.jsonl", True: folder / f"{ERRORS}.jsonl"}
        self.failed: set[int] = set()
        self.done: set[int] = set()
        """Numbers of the input's lines, the failed ones included."""
        self._whole: dict[Path, int] = {}
        for is_error, path in self._paths.items():
            numbers, self._whole[path] = _whole_lines(path)
            self.done |= numbers
            if is_error:
                self.failed |= numbers

    def cut(self) -> None:
        """Cut off what follows the last whole line. By whoever adds, before that."""
        for path, size in self._whole.items():
            if path.exists():
                os.truncate(path, size)

    def add(self, number: int, line: bytes, *, is_error: bool) -> None:
        """The one result of a line of the input. Raises OSError, and there is none."""
        if number in self.done:
            return
        with open_private(self._paths[is_error], "ab", buffering=0) as file:
            begin = file.tell()
            if file.write(line) < len(line):
                # The disk is full: what follows must not stand behind half a line.
                file.truncate(begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.done.add(number)
        if is_error:
            self.failed.add(number)


def _whole_lines(path: Path) -> tuple[set[int], int]:
    """Numbers of whole lines, and the bytes that those are."""
    numbers: set[int] = set()
    size = 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                number = number_of(line)
                if number is None or not line.endswith(b"\n"):
                    break
                size += len(line)
                numbers.add(number)
    return numbers, size


def _told(path: Path) -> dict[str, Any] | None:
    """What a file says; None for one that is gone, or that nobody can read, which is logged and harms no other."""
    try:
        told = orjson.loads(path.read_bytes())
        if isinstance(told, dict):
            return told
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError:
        pass
    _log.warning("%s: cannot be read", path)
    return None


def _batch(path: Path) -> StoredBatch | None:
    told = _told(path)
    try:
        return None if told is None else StoredBatch.from_json(told)
    except (LookupError, TypeError, ValueError):
        _log.warning("%s: no batch, or another version's", path)
        return None


def _batches(folder: Path, pattern: str) -> Iterator[tuple[Path, StoredBatch]]:
    for path in folder.glob(pattern):
        if (batch := _batch(path)) is not None:
            yield path, batch


def _write(path: Path, data: dict[str, Any]) -> None:
    """As a whole or not at all."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open_private(fresh, "wb") as file:
            file.write(orjson.dumps(data))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until nobody else is inside for this folder."""
    with open_private(folder / "alone", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class UploadSlots:
    """So many of a kind; a folder holds a file for each."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most

    def acquire(self) -> IO[bytes] | None:
        """A place, to be closed; None when all are taken."""
        make_private(self._folder)
        for number in range(self._most):
            place = open_private(self._folder / str(number), "ab")
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                place.close()
            else:
                return place
        return None


def acquire_all(*kinds: UploadSlots) -> ExitStack | None:
    """A place of each kind, to be closed together; None when there is none of one of them."""
    with ExitStack() as taken:
        for places in kinds:
            if (place := places.acquire()) is None:
                return None
            taken.enter_context(place)
        return taken.pop_all()
    return None
