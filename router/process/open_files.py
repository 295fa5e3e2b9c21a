"""Open files: how many this process may have, and which of them are for clients."""

import resource
from dataclasses import dataclass

from tandem.config.servers import ConnectionsConfig
from tandem.errors import ConfigError

_MOST_FILES = 65_536
"""More are not asked for: some bounds of the kernel are of a whole machine."""
_LEAST_RESERVE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Connections of clients at each door."""

    http: int
    grpc: int


def raise_file_limit() -> int:
    """Have as many open files as the system lets this process have; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connection_bounds(config: ConnectionsConfig, max_files: int) -> ConnectionBounds:
    """What is stated, or else a share of `max_files`. Raises ConfigError when that is not enough for what is stated."""
    free = max_files - max(_LEAST_RESERVE, max_files // 4)
    grpc = config.max_grpc or max(1, (free - (config.max_http or 0)) // 4)
    http = config.max_http or max(1, free - grpc)
    if http + grpc > free:
        raise ConfigError(
            f"router.connections: {http} over HTTP and {grpc} over gRPC are more than the {free} that a limit of "
            f"{max_files} open files leaves (ulimit -n)"
        )
    return ConnectionBounds(http=http, grpc=grpc)
