"""Versions of the session between routers and workers: which are spoken here, and what each brought. Pure.

Whoever adds a kind of message, or a value to an enumeration that the session carries, raises `SPOKEN.newest` and says
so here. 3: Supersede, Read, ReadPart, Pin, Unpin, PinTold. 4: HELLO says a range of versions.
"""

from collections.abc import Iterable, Mapping

from tandem.protocol.version_negotiation import Dialect, VersionRange

SPOKEN = VersionRange(oldest=3, newest=4)


def _since(kinds: Mapping[int, Iterable[str]]) -> dict[str, int]:
    return {kind: version for version, added in kinds.items() for kind in added}


ROUTER_KINDS = _since(
    {
        2: ("hello", "submit", "cancel", "reroute", "inherit", "settled", "adopt", "resync", "orders"),
        3: ("supersede", "read", "pin", "unpin"),
    }
)
"""Of RouterMessage."""
WORKER_KINDS = _since(
    {
        2: ("hello", "tokens", "refused", "transfer_failed", "kv_events", "load", "draining", "bequest", "inherited"),
        3: ("read", "pin_told"),
    }
)
"""Of WorkerMessage."""


def router_dialect(version: int) -> Dialect:
    """What a router may say."""
    return Dialect(version, ROUTER_KINDS)


def worker_dialect(version: int) -> Dialect:
    """What a worker may say."""
    return Dialect(version, WORKER_KINDS)
