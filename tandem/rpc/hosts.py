"""Host names as they are shown, typed and checked."""

import ipaddress
import re
import socket

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared with, never bound
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_CHARS = 253
DEAD_PEER_MS = 10_000
"""A connection whose peer's machine does not acknowledge for so long has ended."""


def reachable(host: str) -> str:
    """The address under which a client on this machine finds a listener: a wildcard is not one to connect to."""
    return _EVERYWHERE.get(host, host)


def join(host: str, port: int) -> str:
    """`host:port`, with the brackets of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """The parts of `host:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = bare is not host
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536 or len(port) > 5:
        raise ValueError(f"{address[:100]!r} is not host:port")
    if bracketed != (":" in bare):
        raise ValueError(f"{address[:100]!r} is not host:port; put an IPv6 address in brackets")
    return checked_host(bare), int(port)


def checked_host(host: str) -> str:
    """An address or a name that one could listen on or connect to. Raises ValueError."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{host[:100]!r} is not an IP address") from None
    elif not _NAME.fullmatch(host) or len(host) > _MAX_CHARS:
        raise ValueError(f"{host[:100]!r} is neither an IP address nor a host name")
    return host


def checked_address(address: str) -> str:
    """`host:port` that one could connect to. Raises ValueError."""
    split(address)
    return address


def hold(host: str, port: int) -> socket.socket:
    """A listener nobody is served by: while it is open the port (0: a free one) is nobody else's. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
        held.listen(1)  # SO_REUSEADDR lets two bind; only listening is exclusive
    except OSError as error:
        held.close()
        raise OSError(f"cannot listen on {join(host, port)}: {error.strerror}") from None
    return held


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keep_alive(sock: socket.socket) -> None:
    """Small messages at once, and an end when the peer's machine is gone. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
