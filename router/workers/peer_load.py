"""What other routers have under way at each worker, beside what the worker tells. Pure.

A worker's report holds every request that had reached it then, whichever router sent it. So of a peer's requests two
figures count, and never both at once: all that it has under way (the ledger, which the registry weighs against the
report), and what it has sent since a report (added to that very report). A share tells which report its second figure
is counted from: if ours is newer, that part has arrived in it already and adds nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from router.types.worker_view import WorkerKey
from tandem.cluster_state.entries import RouterLoad, Share
from tandem.values.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShare:
    """What all other routers together have at one worker."""

    backlog_tokens: int = 0
    """Not known to be computed."""
    num_requests: int = 0
    """Not known to have ended."""
    backlog_since: int = 0
    """Of these, what our newest report of the worker cannot know of."""
    num_since: int = 0


NO_PEERS = PeerShare()


MAX_REMEMBERED = 1 << 14
"""Routers, of whom few are there at a time."""


class _Heard(NamedTuple):
    shares: dict[WorkerKey, Share]
    lapses_s: float


class PeerLoads:
    """The other routers' loads, each until it lapses."""

    def __init__(self, *, lease_s: float) -> None:
        """`lease_s`: how long a load counts that its router does not write again."""
        self.lease_s = lease_s
        self._heard: dict[Incarnation, _Heard] = {}
        self._sequences: OrderedDict[Incarnation, int] = OrderedDict()
        """Of the newest load of each router, also of those that are gone: who was heard of last is last."""

    def __len__(self) -> int:
        return len(self._heard)

    @property
    def routers(self) -> frozenset[Incarnation]:
        return frozenset(self._heard)

    def heard(self, load: RouterLoad, now_s: float) -> bool:
        """A router's load was read; False when it is no newer than what was known once, and so renews nothing.

        Also of a router that is gone: somebody who can write to Redis may put old loads back.
        """
        former = self._sequences.get(load.router)
        if former is not None and load.sequence <= former:
            return False
        self._sequences[load.router] = load.sequence
        self._sequences.move_to_end(load.router)
        if len(self._sequences) > MAX_REMEMBERED:
            self._sequences.popitem(last=False)
        shares = {WorkerKey(*share.process): share for share in load.shares}
        self._heard[load.router] = _Heard(shares, now_s + self.lease_s)
        return True

    def gone(self, router: Incarnation) -> bool:
        """Its load is no longer there: it left, or died. False when nothing was known of it."""
        return self._heard.pop(router, None) is not None

    def expire(self, now_s: float) -> bool:
        """End what was not renewed; whether there was any."""
        lapsed = [router for router, heard in self._heard.items() if heard.lapses_s <= now_s]
        for router in lapsed:
            del self._heard[router]
        return bool(lapsed)

    def at(self, key: WorkerKey, report_number: int) -> PeerShare:
        """At one worker, beside its report of this number."""
        shares = [share for heard in self._heard.values() if (share := heard.shares.get(key)) is not None]
        if not shares:
            return NO_PEERS
        beyond = [share for share in shares if share.report_number >= report_number]
        return PeerShare(
            backlog_tokens=sum(share.backlog_tokens for share in shares),
            num_requests=sum(share.num_requests for share in shares),
            backlog_since=sum(share.backlog_since for share in beyond),
            num_since=sum(share.num_since for share in beyond),
        )
