"""Which connections are closed and when: the bookkeeping alone, on a virtual clock."""

import pytest

from router.http.server.connection_limits import ConnectionBounds, ConnectionLimits, ConnectionTable, connection_bounds
from tandem.config.servers import ConnectionsConfig
from tandem.errors import ConfigError

LIMITS = ConnectionLimits(most=3, head_timeout_s=10.0, keep_alive_s=60.0, write_timeout_s=30.0)


def nothing_waits(_connection: str) -> int:
    return 0


@pytest.fixture
def books() -> ConnectionTable[str]:
    return ConnectionTable(LIMITS)


def test_connection_table_silent_connection_has_head_timeout(books: ConnectionTable[str]) -> None:
    assert books.opened("a", 0.0) is None
    assert books.opened("b", 5.0) is None
    assert books.overdue(9.9, nothing_waits) == []
    assert books.overdue(10.0, nothing_waits) == ["a"]
    assert len(books) == 1
    assert books.overdue(15.0, nothing_waits) == ["b"]
    assert books.overdue(1000.0, nothing_waits) == []


def test_connection_table_running_request_is_not_overdue(books: ConnectionTable[str]) -> None:
    books.opened("a", 0.0)
    books.head_complete("a")
    assert list(books.asking) == ["a"]
    assert books.overdue(1000.0, nothing_waits) == []


def test_connection_table_next_head_has_own_timeout(books: ConnectionTable[str]) -> None:
    books.opened("a", 0.0)
    books.head_complete("a")
    books.answered("a", 100.0, is_sending=False)
    books.head_begins("a", 150.0)
    books.head_begins("a", 159.0)
    assert books.overdue(159.9, nothing_waits) == []
    assert books.overdue(160.0, nothing_waits) == ["a"]


def test_connection_table_idle_connection_has_keepalive_timeout(books: ConnectionTable[str]) -> None:
    books.opened("a", 0.0)
    books.head_complete("a")
    books.answered("a", 100.0, is_sending=False)
    assert books.overdue(159.9, nothing_waits) == []
    assert books.overdue(160.0, nothing_waits) == ["a"]


def test_connection_table_body_after_answer_has_head_timeout(books: ConnectionTable[str]) -> None:
    books.opened("a", 0.0)
    books.head_complete("a")
    books.answered("a", 100.0, is_sending=True)
    books.head_begins("a", 109.0)
    assert books.overdue(110.0, nothing_waits) == ["a"]


def test_connection_table_full_closes_idlest(books: ConnectionTable[str]) -> None:
    books.opened("asks", 0.0)
    books.head_complete("asks")
    books.opened("answered", 1.0)
    books.head_complete("answered")
    books.answered("answered", 4.0, is_sending=False)
    books.opened("silent", 3.0)
    assert books.opened("x", 5.0) == "silent"
    assert books.opened("y", 6.0) == "answered"
    assert books.opened("z", 7.0) == "x"
    assert len(books) == LIMITS.most


def test_connection_table_full_of_requests_refuses_new_one(books: ConnectionTable[str]) -> None:
    for name in ("a", "b", "c"):
        books.opened(name, 0.0)
        books.head_complete(name)
    assert books.opened("d", 1.0) == "d"
    books.closed("d")
    assert len(books) == 3
    books.answered("b", 2.0, is_sending=False)
    assert books.opened("e", 3.0) == "b"


def test_connection_table_client_without_progress_is_overdue(
    books: ConnectionTable[str],
) -> None:
    left = {"never": 1000, "slow": 1000, "quick": 1000}
    for name in left:
        books.opened(name, 0.0)
        books.head_complete(name)
        books.unread(name, 0.0, 1000)
    given_up = []
    for now_s in range(1, 100):
        left["slow"] -= 1 if now_s % 20 == 0 else 0
        left["quick"] = max(0, left["quick"] - 100)
        given_up += [(now_s, name) for name in books.overdue(float(now_s), left.__getitem__)]
    assert given_up == [(30, "never")]
    books.read("slow")
    assert books.overdue(1000.0, left.__getitem__) == []


def test_connection_table_further_writes_are_no_progress(books: ConnectionTable[str]) -> None:
    books.opened("a", 0.0)
    books.head_complete("a")
    books.unread("a", 0.0, 10)
    books.unread("a", 20.0, 500)
    assert books.overdue(25.0, lambda _: 600) == []
    assert books.overdue(30.0, lambda _: 600) == ["a"]


def test_connection_table_closed_connection_is_forgotten(books: ConnectionTable[str]) -> None:
    for name in ("a", "b", "c"):
        books.opened(name, 0.0)
        books.unread(name, 0.0, 5)
        books.closed(name)
        books.head_complete(name)
        books.answered(name, 1.0, is_sending=False)
        books.head_begins(name, 1.0)
    assert len(books) == 0
    assert books.overdue(1000.0, lambda _: 5) == []


@pytest.mark.parametrize(
    ("stated", "max_files", "bounds"),
    [
        ({}, 1024, ConnectionBounds(http=576, grpc=192)),
        ({"max_http": 100}, 1024, ConnectionBounds(http=100, grpc=167)),
        ({"max_grpc": 10}, 1024, ConnectionBounds(http=758, grpc=10)),
        ({"max_http": 700, "max_grpc": 68}, 1024, ConnectionBounds(http=700, grpc=68)),
        ({}, 256, ConnectionBounds(http=144, grpc=48)),
    ],
)
def test_connection_bounds_default_to_share_of_open_files(
    stated: dict[str, int], max_files: int, bounds: ConnectionBounds
) -> None:
    assert connection_bounds(ConnectionsConfig(**stated), max_files) == bounds


def test_connection_bounds_beyond_open_files_are_config_error() -> None:
    with pytest.raises(ConfigError, match=r"router\.connections: 700 over HTTP and 100 over gRPC"):
        connection_bounds(ConnectionsConfig(max_http=700, max_grpc=100), 1024)
