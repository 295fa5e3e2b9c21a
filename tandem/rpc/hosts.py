"""Formats, parses and validates host names and addresses."""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared with, never bound
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_CHARS = 253
_WEB_PORTS = {"http": 80, "https": 443}
DEAD_PEER_MS = 10_000
"""A connection whose peer's machine acknowledges nothing for this long is closed."""


def reachable(host: str) -> str:
    """The address at which a client on this machine reaches a listener: loopback in place of a wildcard."""
    return _EVERYWHERE.get(host, host)


def join(host: str, port: int) -> str:
    """Format `host:port`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = bare is not host
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536 or len(port) > 5:
        raise ValueError(f"{address[:100]!r} is not host:port")
    if bracketed != (":" in bare):
        raise ValueError(f"{address[:100]!r} is not host:port; put an IPv6 address in brackets")
    return checked_host(bare), int(port)


def checked_host(host: str) -> str:
    """Validate an IP address or host name. Raises ValueError."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{host[:100]!r} is not an IP address") from None
    elif not _NAME.fullmatch(host) or len(host) > _MAX_CHARS:
        raise ValueError(f"{host[:100]!r} is neither an IP address nor a host name")
    return host


def checked_address(address: str) -> str:
    """Validate a `host:port` to connect to. Raises ValueError."""
    split(address)
    return address


def checked_origin(origin: str) -> str:
    """Return a web origin, such as https://chat.example.com, as browsers write it. Raises ValueError."""
    wrong = ValueError(f"{origin[:100]!r} is not an origin such as https://chat.example.com or http://localhost:3000")
    try:
        parts = urlsplit(origin.lower())
        host, port = checked_host(parts.hostname or ""), parts.port
    except ValueError:
        raise wrong from None
    shown = f"[{host}]" if ":" in host else host
    given = shown if port is None else f"{shown}:{port}"
    if parts.scheme not in _WEB_PORTS or origin.lower() != f"{parts.scheme}://{given}":
        raise wrong
    return f"{parts.scheme}://{shown if port == _WEB_PORTS[parts.scheme] else given}"


def hold(host: str, port: int) -> socket.socket:
    """Hold a port (0: a free one) with a listener that serves nothing, until it is closed. Raises OSError."""
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
    """Whether an address is loopback, or the name localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keep_alive(sock: socket.socket) -> None:
    """Set TCP options: no delay of small messages, and an end when the peer's machine is gone. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
