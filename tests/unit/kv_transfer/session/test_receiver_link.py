"""A hand-off link to an address that this worker must not connect to."""

import asyncio

from kv_transfer.protocol.messages import Hello
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_link import Dialer, ReceiverLink, make_hello
from tandem.rpc.cluster_grpc import ClusterChannels
from tandem.values.ids import Incarnation, WorkerId
from tests.support.kv_transfer.handoff_fakes import LAYOUT, SETTINGS


class Waiting:
    """A LinkUser that wants its peer, whatever happens."""

    def __init__(self) -> None:
        self.reasons: asyncio.Queue[str] = asyncio.Queue()

    def link_up(self, link: ReceiverLink) -> None:
        raise AssertionError

    def link_down(self, _link: ReceiverLink, reason: str) -> None:
        self.reasons.put_nowait(reason)

    def link_needed(self, _link: ReceiverLink) -> bool:
        return True


async def test_peer_beyond_loopback_is_not_reached_in_the_clear() -> None:
    local = LocalWorker(worker_id=WorkerId("d"), incarnation=Incarnation(1), layout=LAYOUT, num_blocks=4)

    async def hello() -> Hello:
        return make_hello(local, ())

    user = Waiting()
    link = ReceiverLink(
        "192.0.2.1:7001",
        local=local,
        make_hello=hello,
        dialer=Dialer(open_channel=ClusterChannels(None).open),
        user=user,
        settings=SETTINGS,
    )
    running = asyncio.create_task(link.run())
    for _ in range(2):
        reason = await user.reasons.get()
        assert reason.startswith("link to 192.0.2.1:7001: cluster.tls: 192.0.2.1 is beyond loopback")
    link.close()
    await running
