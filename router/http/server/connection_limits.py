"""Decides which HTTP connections to close: those that are too slow, and the idlest when there are too many. Pure.

    opened -> (head comes) -> asking -> answered -> (next head comes) -> asking ...

A head must arrive in time, and so must the start of the next one; while a request is in progress its own deadline
bounds it. What was written must be read: a client that reads none of it for too long is given up, whatever else it
does.
"""

import resource
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.config.servers import ConnectionsConfig
from tandem.errors import ConfigError

_MOST_FILES = 65_536
"""Files to request at most: some of the kernel's bounds apply to the whole machine."""
_LEAST_RESERVE = 64

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on the connections of one server."""

    most: int
    head_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float

    @classmethod
    def from_config(cls, config: ConnectionsConfig, *, most: int, write_timeout_s: float) -> "ConnectionLimits":
        """Take the bounds from the configuration."""
        return cls(
            most=most,
            head_timeout_s=config.head_timeout_s,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=write_timeout_s,
        )


class ConnectionTable(Generic[ConnectionT]):
    """The open connections by what they wait for. Call `closed` for each that ends."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        # Ordered by time, the longest first.
        self._heads: dict[ConnectionT, float] = {}
        self._idle: dict[ConnectionT, float] = {}
        self._asking: set[ConnectionT] = set()
        self._unread: dict[ConnectionT, tuple[float, int]] = {}
        """Clients that have stopped reading: the time since when, and the number of unread bytes."""

    def __len__(self) -> int:
        return len(self._heads) + len(self._idle) + len(self._asking)

    @property
    def asking(self) -> Iterable[ConnectionT]:
        """The connections with a request in progress."""
        return self._asking

    def opened(self, connection: ConnectionT, now_s: float) -> ConnectionT | None:
        """Register a connection; return the one to close for it, itself when all others have requests in progress."""
        gone = None
        if len(self) >= self.limits.most and (gone := self.remove_idlest()) is None:
            return connection
        self._heads[connection] = now_s
        return gone

    def remove_idlest(self) -> ConnectionT | None:
        """Remove and return the connection without a request for longest; None when all have one in progress."""
        firsts = [next(iter(waiting.items())) for waiting in (self._heads, self._idle) if waiting]
        if not firsts:
            return None
        gone = min(firsts, key=lambda first: first[1])[0]
        self.closed(gone)
        return gone

    def head_begins(self, connection: ConnectionT, now_s: float) -> None:
        """Note the first byte of a next request; for the first request the time began earlier."""
        if self._idle.pop(connection, None) is not None:
            self._heads[connection] = now_s

    def head_complete(self, connection: ConnectionT) -> None:
        """Note that a request is in progress."""
        if self._heads.pop(connection, None) is not None or self._idle.pop(connection, None) is not None:
            self._asking.add(connection)

    def answered(self, connection: ConnectionT, now_s: float, *, is_sending: bool) -> None:
        """Note that no request is in progress; `is_sending`: more of the last one, or the start of the next, is
        arriving."""
        if connection in self._asking:
            self._asking.remove(connection)
            (self._heads if is_sending else self._idle)[connection] = now_s

    def idle(self, now_s: float, least_s: float) -> list[ConnectionT]:
        """Return connections without a request for so long; they stay in the table."""
        return [*_older(self._heads, now_s - least_s), *_older(self._idle, now_s - least_s)]

    def unread(self, connection: ConnectionT, now_s: float, num_bytes: int) -> None:
        """Note the bytes that wait for the client to read them."""
        self._unread.setdefault(connection, (now_s, num_bytes))

    def read(self, connection: ConnectionT) -> None:
        """Note that the client has read enough."""
        self._unread.pop(connection, None)

    def closed(self, connection: ConnectionT) -> None:
        """Remove a connection that is closed, or will be."""
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)
        self._asking.discard(connection)
        self._unread.pop(connection, None)

    def overdue(self, now_s: float, num_waiting: Callable[[ConnectionT], int]) -> list[ConnectionT]:
        """Remove and return the connections whose time is up. `num_waiting`: bytes that a client has yet to read."""
        found = [*_older(self._heads, now_s - self.limits.head_timeout_s)]
        found += _older(self._idle, now_s - self.limits.keep_alive_s)
        for connection, (since_s, num_bytes) in list(self._unread.items()):
            left = num_waiting(connection)
            if not left:
                del self._unread[connection]
            elif left != num_bytes:
                self._unread[connection] = (now_s if left < num_bytes else since_s, left)
            elif now_s - since_s >= self.limits.write_timeout_s:
                found.append(connection)
        for connection in found:
            self.closed(connection)
        return found


def _older(waiting: dict[ConnectionT, float], than_s: float) -> list[ConnectionT]:
    found = []
    for connection, since_s in waiting.items():
        if since_s > than_s:
            break
        found.append(connection)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds on clients' connections at each server."""

    http: int
    grpc: int


def raise_file_limit() -> int:
    """Raise the limit on open files as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connection_bounds(config: ConnectionsConfig, max_files: int) -> ConnectionBounds:
    """Return the configured bounds, or else a share of `max_files`. Raises ConfigError when there are too few files."""
    free = max_files - max(_LEAST_RESERVE, max_files // 4)
    grpc = config.max_grpc or max(1, (free - (config.max_http or 0)) // 4)
    http = config.max_http or max(1, free - grpc)
    if http + grpc > free:
        raise ConfigError(
            f"router.connections: {http} over HTTP and {grpc} over gRPC are more than the {free} that a limit of "
            f"{max_files} open files leaves (ulimit -n)"
        )
    return ConnectionBounds(http=http, grpc=grpc)
