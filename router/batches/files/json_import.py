"""Imports the files and batches that the version before 0.1 kept as JSON files, one folder per batch. Blocking.

A router process of that version may still write such files during an upgrade, so the import runs again with each sweep.
It will be removed with the version after next.
"""

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from router.batches.files.database import Database
from router.batches.files.lines import number_of
from router.batches.files.types import StoredBatch, StoredFile

_BATCH = "INSERT OR IGNORE INTO batches VALUES (?, ?, ?, ?, ?, ?)"
_FILE = "INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
_RESULT = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
_log = logging.getLogger(__name__)


def import_json_files(database: Database, tenants: Path) -> None:
    """Move JSON files into the database. Only while no other process runs batches. Raises OSError."""
    for path in tenants.glob("*/files/file-*.json"):
        file = _read_file(path)
        if file is not None:
            values = (file.id, path.parent.parent.name, file.filename, file.purpose, file.num_bytes)
            row = (*values, file.created_s, file.expires_s)
            database.write(lambda connection, row=row: connection.execute(_FILE, row))  # type: ignore[misc]
            path.unlink(missing_ok=True)
    for path in tenants.glob("*/batches/*/batch.json"):
        batch = _read_batch(path)
        if batch is not None:
            _import_batch(database, path.parent, batch)
            shutil.rmtree(path.parent, ignore_errors=True)


def _import_batch(database: Database, folder: Path, batch: StoredBatch) -> None:
    """Import a batch completely or not at all: requests that it had answered are not run again."""
    owner, state = folder.parent.parent.name, orjson.dumps(batch.to_json()).decode()
    is_cancelled = (folder / "cancel").exists()
    row = (batch.id, owner, batch.created_s, batch.status.is_final, is_cancelled, state)

    def add(connection: sqlite3.Connection) -> None:
        if connection.execute(_BATCH, row).rowcount:
            for is_error, name in enumerate(("output", "errors")):
                for number, line in _whole_lines(folder / f"{name}.jsonl"):
                    connection.execute(_RESULT, (batch.id, number, is_error, line))

    database.write(add)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield results by number; skips a last line that the process died in."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            number = number_of(line)
            if number is None or not line.endswith(b"\n"):
                return
            yield number, line


def _read_file(path: Path) -> StoredFile | None:
    try:
        return StoredFile(id=path.stem, num_bytes=path.with_suffix(".data").stat().st_size, **_read(path))
    except FileNotFoundError:
        return None  # an upload that another process is about to finish
    except (TypeError, ValueError):
        _log.warning("%s: cannot be imported", path)
        return None


def _read_batch(path: Path) -> StoredBatch | None:
    try:
        return StoredBatch.from_json(_read(path))
    except FileNotFoundError:
        return None
    except (LookupError, TypeError, ValueError):
        _log.warning("%s: cannot be imported", path)
        return None


def _read(path: Path) -> Any:
    return orjson.loads(path.read_bytes())
