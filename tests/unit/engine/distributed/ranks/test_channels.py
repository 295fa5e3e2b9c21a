"""Rank 0's connections can be closed from any thread, whatever other threads do with them."""

import socket

from engine.distributed.links.channel import RankChannel
from engine.distributed.ranks.channels import Channels


def test_channels_end_during_add_reaches_existing_ranks() -> None:
    channels = Channels()
    ends = [socket.socketpair() for _ in range(3)]

    class Late(RankChannel):
        def hang_up(self) -> None:
            """At that moment another thread adds one."""
            channels.add({3: RankChannel(ends[2][0], "rank 3")})
            super().hang_up()

    channels.add({1: Late(ends[0][0], "rank 1"), 2: RankChannel(ends[1][0], "rank 2")})
    channels.hang_up()
    assert [there.recv(1) for _, there in ends[:2]] == [b"", b""]
    channels.close()
    for _, there in ends:
        there.close()
