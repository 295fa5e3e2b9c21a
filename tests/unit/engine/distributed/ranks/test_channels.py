"""Rank 0's connections can be closed from any thread, whatever other threads do with them."""

import socket

from engine.distributed.links.channel import RankChannel
from engine.distributed.links.listener import JoinedRank
from engine.distributed.ranks.channels import Channels


def test_channels_end_during_add_reaches_existing_ranks() -> None:
    channels = Channels()
    ends = [socket.socketpair() for _ in range(3)]
    cut: list[int] = []
    regions = [socket.socketpair() for _ in range(3)]

    def joined(steps: RankChannel, rank: int) -> JoinedRank:
        return JoinedRank(steps=steps, region=RankChannel(regions[rank - 1][0], f"rank {rank}"))

    class Late(RankChannel):
        def hang_up(self) -> None:
            """At that moment another thread adds one."""
            channels.add({3: joined(RankChannel(ends[2][0], "rank 3"), 3)}, on_cut=cut.append)
            super().hang_up()

    steps = {1: Late(ends[0][0], "rank 1"), 2: RankChannel(ends[1][0], "rank 2")}
    channels.add({rank: joined(channel, rank) for rank, channel in steps.items()}, on_cut=None)
    # Whoever has no use for the connections for KV closes them.
    assert [there.recv(1) for _, there in regions[:2]] == [b"", b""]
    channels.hang_up()
    assert [there.recv(1) for _, there in ends[:2]] == [b"", b""]
    on_cut = channels.regions[3].on_cut
    assert on_cut is not None
    on_cut()
    assert cut == [3]
    channels.close()
    assert regions[2][1].recv(1) == b""
    for _, there in ends + regions:
        there.close()
