"""The SQLite database of batches under concurrent threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.batches.files.database import Database

_COUNT = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100) SELECT i FROM n"
_TIMEOUT_S = 60.0


@pytest.fixture
def database(tmp_path: Path) -> Database:
    made = Database(tmp_path / "batches.sqlite3")
    made.open()
    return made


def test_database_close_waits_for_reads_in_other_threads(database: Database) -> None:
    reading, may_go_on = threading.Event(), threading.Event()

    def read() -> list[int]:
        found = []
        for (number,) in database.iterate(_COUNT):
            found.append(number)
            reading.set()
            assert may_go_on.wait(_TIMEOUT_S)
        return found

    with ThreadPoolExecutor(2) as threads:
        rows = threads.submit(read)
        assert reading.wait(_TIMEOUT_S)
        closed = threads.submit(database.close)
        # Without the lock it is closed by now.
        assert not threading.Event().wait(0.2)
        may_go_on.set()
        assert rows.result(_TIMEOUT_S) == list(range(1, 101))
        closed.result(_TIMEOUT_S)


def test_database_read_after_close_reopens(database: Database) -> None:
    assert database.read("SELECT 1") == [(1,)]
    database.close()
    assert database.read("SELECT 2") == [(2,)]


def test_database_closes_connections_of_ended_threads(database: Database) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        thread = threading.Thread(target=database.read, args=("SELECT 1",))
        thread.start()
        thread.join(_TIMEOUT_S)
    # The last one's, with its write-ahead log, until the next one comes.
    assert len(os.listdir("/proc/self/fd")) <= num_open + 3
    assert len(database._connections) == 2
    database.close()
