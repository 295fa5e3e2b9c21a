"""RENEW messages, which are frequent and list thousands of holds."""

from typing import Any

from kv_transfer.protocol.messages import HandoffEnvelope, Renew, TransferKey
from kv_transfer.transports.in_process import MemoryFabric
from tandem.values.ids import Incarnation, TransferId
from tests.integration.handoff.test_failures import decoding


class Ids(tuple):
    """Names that may be iterated once, and never searched."""

    def __contains__(self, _: object) -> bool:
        raise AssertionError("each search looks at all of them")


class Live:
    """An attempt that counts how often its lease was renewed."""

    def __init__(self, name: str, link: object) -> None:
        self.key = TransferKey(transfer_id=TransferId(name), attempt=1)
        self.link = link
        self.machine = self
        self.num_renewals = 0

    def renew(self, _now: float) -> None:
        self.num_renewals += 1


class Link:
    peer = Incarnation(5)


async def test_renewal_touches_only_the_named_holds() -> None:
    async with decoding("memory", fabric=MemoryFabric()) as (hub, _):
        link, other = Link(), Link()
        attempts = [Live("a", link), Live("b", link), Live("c", link), Live("a", other)]
        pretended: Any = {(i, attempt.key): attempt for i, attempt in enumerate(attempts)}
        hub._attempts, before = pretended, hub._attempts
        body = Renew(transfer_ids=Ids((TransferId("a"), TransferId("c"), TransferId("gone"))))
        at: Any = link
        hub.deliver(at, HandoffEnvelope(incarnation=Incarnation(5), addressee=Incarnation(22), key=None, body=body))
        hub._attempts = before
        assert [attempt.num_renewals for attempt in attempts] == [1, 0, 1, 0]
