"""Files and batches of tenants: a SQLite database beside the files' contents. Blocking: for threads, or for short
calls.

A request with a result is never run again: a result is a row of its own, written as soon as it is known. Once a batch
has all of them they become a file, in one transaction with the files' rows.
"""

import fcntl
import logging
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import orjson

from router.batches.files.database import Database
from router.batches.files.json_import import import_json_files
from router.batches.files.private_files import FOLDER, close_to_others, make_private, open_private
from router.batches.files.types import ObjectNotFound, StoredBatch, StoredFile
from tandem.errors import ConfigError, Overloaded

_INCOMING, _UPLOADS, _TENANTS = "incoming", "uploads", "tenants"
_UPLOAD_S = 3600.0
"""Longer than any upload may take."""
MAX_FILES = 10_000
"""Files of one tenant, however small they are."""
MAX_UPLOADS = 16
MAX_UPLOADS_OF_TENANT = 4
"""Concurrent uploads of all processes, and those of one tenant: each may take twice a file's largest size of disk."""
MAX_ENDED_BATCHES = 1_000
"""Ended batches of one tenant; older ones are deleted."""
_FILES = "SELECT id, filename, purpose, num_bytes, created_s, expires_s FROM files WHERE owner = ?"
_ADD_FILE = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
_ADD_BATCH = "INSERT INTO batches (id, owner, created_s, is_final, state) VALUES (?, ?, ?, ?, ?)"
_SAVE_BATCH = f"{_ADD_BATCH} ON CONFLICT (id) DO UPDATE SET is_final = excluded.is_final, state = excluded.state"
_OLD_BATCHES = (
    "SELECT id FROM (SELECT id, created_s, row_number() OVER (PARTITION BY owner ORDER BY created_s DESC, id) AS place "
    "FROM batches WHERE is_final) WHERE place > ? OR created_s <= ?"
)
_log = logging.getLogger(__name__)


class UploadSlots:
    """At most `limit` uploads at a time, of all router processes of a host: a folder has a locked file for each slot.

    A process that dies frees its slots.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def acquire(self) -> IO[bytes] | None:
        """Acquire a slot, to be closed; None when all are taken."""
        make_private(self._folder)
        for number in range(self._limit):
            slot = open_private(self._folder / str(number), "ab")
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                slot.close()
            else:
                return slot
        return None


def acquire_all(*kinds: UploadSlots) -> ExitStack | None:
    """Acquire a slot of each kind, to be closed together; None when one of them has none left."""
    with ExitStack() as acquired:
        for slots in kinds:
            if (slot := slots.acquire()) is None:
                return None
            acquired.enter_context(slot)
        return acquired.pop_all()
    return None


class BatchStore:
    """Files and batches of one folder, which several processes may open."""

    def __init__(self, folder: Path, *, max_tenant_bytes: int, keep_s: float) -> None:
        self._folder = folder
        self._max_tenant_bytes = max_tenant_bytes
        self._keep_s = keep_s
        self._lock: IO[bytes] | None = None
        self._database = Database(folder / "batches.sqlite3")

    def open(self) -> None:
        """Create the folder and the database. Raises ConfigError when that fails."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=FOLDER)
            make_private(self._folder / _INCOMING)
            for name in (_INCOMING, _UPLOADS, _TENANTS):
                close_to_others(self._folder / name)
            with exclusive(self._folder):
                self._database.open()
                if self.may_run():
                    import_json_files(self._database, self._folder / _TENANTS)
                    self._release()
        except OSError as error:
            raise ConfigError(f"router.batches.path: {self._folder}: {error.strerror}") from None

    def may_run(self) -> bool:
        """Whether this process runs the batches: the first one to call this does, until it ends."""
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
        """Finish writing, then let another process run batches."""
        self._database.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Files

    def incoming(self) -> Path:
        """Make a new path for an upload's bytes."""
        return self._folder / _INCOMING / secrets.token_hex(16)

    def begin_upload(self, tenant: str) -> ExitStack:
        """Acquire the slots of one upload, to be closed. Raises Overloaded when all are taken."""
        of_tenant = UploadSlots(self._folder_of(_owner(tenant), _UPLOADS), MAX_UPLOADS_OF_TENANT)
        slots = acquire_all(of_tenant, UploadSlots(self._folder / _UPLOADS, MAX_UPLOADS))
        if slots is None:
            raise Overloaded("too many uploads at once", retry_after_s=1.0)
        return slots

    def add_file(self, tenant: str, content: Path, *, filename: str, purpose: str, now_s: float) -> StoredFile:
        """Store a finished upload, moving its content. Raises Overloaded when the tenant stores too much, OSError."""
        owner = _owner(tenant)
        file = self._new_file(f"file-{secrets.token_hex(16)}", content, filename, purpose, now_s)
        target = self._data(owner, file.id)

        def add(connection: sqlite3.Connection) -> None:
            [(held, count)] = connection.execute(
                "SELECT coalesce(sum(num_bytes), 0), count(*) FROM files WHERE owner = ?", (owner,)
            )
            if held + file.num_bytes > self._max_tenant_bytes:
                raise Overloaded(f"files take {held} bytes, at most {self._max_tenant_bytes}: delete some first")
            if count >= MAX_FILES:
                raise Overloaded(f"there are {count} files, at most {MAX_FILES}: delete some first")
            connection.execute(_ADD_FILE, _file_row(owner, file))
            content.replace(target)

        try:
            self._database.write(add)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        return file

    def file(self, tenant: str, name: str) -> StoredFile:
        """Return a file's record. Raises ObjectNotFound when the tenant has no such file."""
        owner = _owner(tenant)
        found = self._database.read(f"{_FILES} AND id = ?", (owner, name))
        if not found or not self._data(owner, name).exists():
            raise ObjectNotFound(f"no file {name[:100]!r}", param="file_id")
        return _file(found[0])

    def content(self, tenant: str, name: str) -> Path:
        """Return the path of a file's bytes. Raises ObjectNotFound."""
        return self._data(_owner(tenant), self.file(tenant, name).id)

    def files(self, tenant: str) -> list[StoredFile]:
        """Return the tenant's files, newest first."""
        sql = f"{_FILES} ORDER BY created_s DESC, id"
        return [_file(row) for row in self._database.read(sql, (_owner(tenant),))]

    def delete_file(self, tenant: str, name: str) -> None:
        """Delete a file. Raises ObjectNotFound when the tenant has no such file."""
        path = self.content(tenant, name)
        self._database.write(lambda connection: connection.execute("DELETE FROM files WHERE id = ?", (name,)))
        path.unlink(missing_ok=True)

    # Batches

    def add_batch(self, batch: StoredBatch, *, most: int) -> None:
        """Add a new batch. Raises Overloaded when `most` of the tenant's have not ended."""

        def add(connection: sqlite3.Connection) -> None:
            [(live,)] = connection.execute(
                "SELECT count(*) FROM batches WHERE owner = ? AND NOT is_final", (_owner(batch.tenant),)
            )
            if live >= most:
                raise Overloaded(f"{live} batches have not ended, at most {most}", retry_after_s=60.0)
            connection.execute(_ADD_BATCH, _batch_row(batch))

        self._database.write(add)

    def save(self, batch: StoredBatch) -> None:
        self._database.write(lambda connection: connection.execute(_SAVE_BATCH, _batch_row(batch)))

    def batch(self, tenant: str, name: str) -> StoredBatch:
        """Return a batch. Raises ObjectNotFound when the tenant has no such batch."""
        rows = self._database.read("SELECT state FROM batches WHERE owner = ? AND id = ?", (_owner(tenant), name))
        for batch in _batches(rows):
            return batch
        raise ObjectNotFound(f"no batch {name[:100]!r}", param="batch_id")

    def batches(self, tenant: str) -> list[StoredBatch]:
        """Return the tenant's batches, newest first."""
        sql = "SELECT state FROM batches WHERE owner = ? ORDER BY created_s DESC, id"
        return list(_batches(self._database.read(sql, (_owner(tenant),))))

    def live(self) -> list[StoredBatch]:
        """Return the batches of all tenants that have not ended, oldest first."""
        sql = "SELECT state FROM batches WHERE NOT is_final ORDER BY created_s, id"
        return list(_batches(self._database.read(sql)))

    def cancel(self, batch: StoredBatch) -> None:
        """Request cancellation by the process that runs the batch."""
        sql = "UPDATE batches SET is_cancelled = 1 WHERE id = ?"
        self._database.write(lambda connection: connection.execute(sql, (batch.id,)))

    def is_cancelled(self, batch: StoredBatch) -> bool:
        """Whether cancellation was requested."""
        return self._database.read("SELECT is_cancelled FROM batches WHERE id = ?", (batch.id,)) == [(1,)]

    def results(self, batch: StoredBatch) -> "Results":
        """Return the results so far."""
        return Results(self._database, batch.id)

    def publish(self, batch: StoredBatch, now_s: float) -> tuple[str | None, str | None]:
        """Make files of the results; return the ids of the answers' and the errors' file. Idempotent."""
        owner, names = _owner(batch.tenant), _result_files(batch.id)
        with ExitStack() as written:
            contents = [self.incoming() for _ in names]
            for path in contents:
                written.callback(path.unlink, missing_ok=True)
            files = []
            for is_error, (name, path) in enumerate(zip(names, contents, strict=True)):
                if self._write_results(batch.id, is_error, path):
                    kind = name.rpartition("-")[2]
                    file = self._new_file(name, path, f"{batch.id}_{kind}.jsonl", "batch_output", now_s)
                    files.append((file, path))

            def publish(connection: sqlite3.Connection) -> None:
                if not connection.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,)).rowcount:
                    return  # already published
                for file, path in files:
                    connection.execute(_ADD_FILE, _file_row(owner, file))
                    path.replace(self._data(owner, file.id))

            self._database.write(publish)
        found = [self._database.read("SELECT id FROM files WHERE id = ?", (name,)) for name in names]
        output, errors = (rows[0][0] if rows else None for rows in found)
        return output, errors

    def _write_results(self, batch_id: str, is_error: int, path: Path) -> int:
        """Write results to a new file; return the number of bytes."""
        sql = "SELECT line FROM results WHERE batch_id = ? AND is_error = ? ORDER BY number"
        with open_private(path, "wb") as file:
            for (line,) in self._database.iterate(sql, (batch_id, is_error)):
                file.write(line)
            return file.tell()

    def sweep(self, now_s: float) -> None:
        """Delete what has expired and uploads that were never finished.

        Only for the process that runs batches: it also imports what the previous version left.
        """
        import_json_files(self._database, self._folder / _TENANTS)
        expired = self._database.read("SELECT id, owner FROM files WHERE expires_s <= ?", (now_s,))
        ended = self._database.read(_OLD_BATCHES, (MAX_ENDED_BATCHES, now_s - self._keep_s))

        def delete(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM files WHERE id = ?", [row[:1] for row in expired])
            connection.executemany("DELETE FROM batches WHERE id = ?", ended)
            connection.executemany("DELETE FROM results WHERE batch_id = ?", ended)
            connection.execute("PRAGMA incremental_vacuum").fetchall()

        self._database.write(delete)
        for name, owner in expired:
            self._data(owner, name).unlink(missing_ok=True)
        self._delete_leftovers(now_s)

    def _delete_leftovers(self, now_s: float) -> None:
        """Delete bytes without a row: of interrupted uploads, and of a process killed between writing the two."""
        known = {name for (name,) in self._database.read("SELECT id FROM files")}
        unknown = (p for p in self._folder.glob(f"{_TENANTS}/*/files/*.data") if p.stem not in known)
        for path in (*(self._folder / _INCOMING).iterdir(), *unknown):
            with suppress(FileNotFoundError):  # its upload has just ended
                if path.stat().st_mtime + _UPLOAD_S <= now_s and not path.with_suffix(".json").exists():
                    path.unlink(missing_ok=True)

    def _new_file(self, name: str, content: Path, filename: str, purpose: str, now_s: float) -> StoredFile:
        return StoredFile(
            id=name,
            filename=filename,
            purpose=purpose,
            num_bytes=content.stat().st_size,
            created_s=int(now_s),
            expires_s=int(now_s + self._keep_s),
        )

    def _data(self, owner: str, name: str) -> Path:
        return self._folder_of(owner, "files") / f"{name}.data"

    def _folder_of(self, owner: str, kind: str) -> Path:
        folder = self._folder / _TENANTS / owner / kind
        make_private(folder)
        return folder


class Results:
    """The results of one batch."""

    def __init__(self, database: Database, batch_id: str) -> None:
        self._database = database
        self._batch_id = batch_id
        rows = database.read("SELECT number, is_error FROM results WHERE batch_id = ?", (batch_id,))
        self.done = {number for number, _ in rows}
        """Numbers of the input lines that have a result, failed ones included."""
        self.failed = {number for number, is_error in rows if is_error}

    def add(self, lines: Sequence[tuple[int, bytes]], *, is_error: bool) -> None:
        """Add result lines by input line number, all or none; the first result of a number wins.

        Raises OSError.
        """
        rows = [(self._batch_id, number, is_error, line) for number, line in lines if number not in self.done]
        sql = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"

        def add(connection: sqlite3.Connection) -> list[int]:
            return [row[1] for row in rows if connection.execute(sql, row).rowcount]

        added = self._database.write(add)
        self.done.update(added)
        if is_error:
            self.failed.update(added)


def _owner(tenant: str) -> str:
    """Return a folder name for a tenant, whose own name may have any characters."""
    return blake2b(tenant.encode(), digest_size=16, person=b"tandem-batches").hexdigest()


def _result_files(batch_id: str) -> tuple[str, str]:
    stem = f"file-{batch_id.removeprefix('batch_')}"
    return f"{stem}-output", f"{stem}-errors"


def _file(row: tuple[Any, ...]) -> StoredFile:
    name, filename, purpose, num_bytes, created_s, expires_s = row
    return StoredFile(
        id=name, filename=filename, purpose=purpose, num_bytes=num_bytes, created_s=created_s, expires_s=expires_s
    )


def _file_row(owner: str, file: StoredFile) -> tuple[object, ...]:
    return file.id, owner, file.filename, file.purpose, file.num_bytes, file.created_s, file.expires_s


def _batch_row(batch: StoredBatch) -> tuple[object, ...]:
    state = orjson.dumps(batch.to_json()).decode()
    return batch.id, _owner(batch.tenant), batch.created_s, batch.status.is_final, state


def _batches(rows: Sequence[tuple[Any, ...]]) -> Iterator[StoredBatch]:
    """Yield the batches that can be read: an unreadable one, perhaps of another version, harms no other."""
    for (state,) in rows:
        try:
            yield StoredBatch.from_json(orjson.loads(state))
        except (LookupError, TypeError, ValueError):
            _log.warning("cannot read a batch, it may be another version's: %.100s", state)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside for this folder."""
    with open_private(folder / "alone", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
