"""The load of other routers on each worker, beyond what the worker itself reports. Pure.

A worker's report counts every request that had reached it then, whichever router sent it. So two figures of a peer's
requests are used, never both at once: everything it has in flight (which the registry compares with the report), and
what it has sent since a report (added to that very report). A share names the report that its second figure is counted
from: if ours is newer, that part is already in it and adds nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from router.types.worker_view import WorkerKey
from tandem.cluster_state.entries import RouterLoad, Share
from tandem.values.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShare:
    """The combined load of all other routers on one worker."""

    backlog_tokens: int = 0
    """Tokens not known to be computed."""
    num_requests: int = 0
    """Requests not known to have ended."""
    backlog_since: int = 0
    """The part of these that our newest report from the worker cannot include."""
    num_since: int = 0


NO_PEERS = PeerShare()


MAX_REMEMBERED = 1 << 14
"""Routers remembered; few are connected at a time."""


class _PeerReport(NamedTuple):
    shares: dict[WorkerKey, Share]
    lapses_s: float


class PeerLoads:
    """The other routers' loads, each until its lease ends."""

    def __init__(self, *, lease_s: float, turn_s: float = 0.0) -> None:
        """`lease_s`: how long a load counts, from when it was written, without being renewed by its router.

        `turn_s`: time between two calls of `update` and `expire`. A load may have been written that long before it is
        read, and may lapse that long before it is noticed.
        """
        self.lease_s = lease_s
        self._lapse_s = lease_s - 2 * turn_s
        self._reported: dict[Incarnation, _PeerReport] = {}
        self._sequences: OrderedDict[Incarnation, int] = OrderedDict()
        """Sequence number of each router's newest load, including routers that are gone; the most recently heard is
        last."""

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def routers(self) -> frozenset[Incarnation]:
        return frozenset(self._reported)

    def update(self, load: RouterLoad, now_s: float) -> bool:
        """Apply a router's load; False when it is no newer than one already seen, and so renews nothing.

        This covers routers that are gone, too: anyone who can write to Redis might replay old loads.
        """
        former = self._sequences.get(load.router)
        if former is not None and load.sequence <= former:
            return False
        self._sequences[load.router] = load.sequence
        self._sequences.move_to_end(load.router)
        if len(self._sequences) > MAX_REMEMBERED:
            self._sequences.popitem(last=False)
        shares = {WorkerKey(*share.process): share for share in load.shares}
        self._reported[load.router] = _PeerReport(shares, now_s + self._lapse_s)
        return True

    def remove(self, router: Incarnation) -> bool:
        """Remove the load of a router that left or died. False when there was none."""
        return self._reported.pop(router, None) is not None

    def expire(self, now_s: float) -> bool:
        """Remove loads that were not renewed; return whether there were any."""
        lapsed = [router for router, reported in self._reported.items() if reported.lapses_s <= now_s]
        for router in lapsed:
            del self._reported[router]
        return bool(lapsed)

    def at(self, key: WorkerKey, report_number: int) -> PeerShare:
        """Return the load on one worker beyond its report of this number."""
        shares = [share for reported in self._reported.values() if (share := reported.shares.get(key)) is not None]
        if not shares:
            return NO_PEERS
        beyond = [share for share in shares if share.report_number >= report_number]
        return PeerShare(
            backlog_tokens=sum(share.backlog_tokens for share in shares),
            num_requests=sum(share.num_requests for share in shares),
            backlog_since=sum(share.backlog_since for share in beyond),
            num_since=sum(share.num_since for share in beyond),
        )
