"""Host names as they are shown and typed."""

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared with, never bound


def reachable(host: str) -> str:
    """The address under which a client on this machine finds a listener: a wildcard is not one to connect to."""
    return _EVERYWHERE.get(host, host)


def join(host: str, port: int) -> str:
    """`host:port`, with the brackets of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
