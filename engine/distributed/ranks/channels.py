"""Rank 0's connections to all other ranks: broadcasts, messages to each, and answers collected from all."""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.heartbeat import HeartbeatServer
from engine.distributed.links.listener import JoinedRank, NodeListener
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.ranks.processes import RankCommand, rank_command
from engine.distributed.ranks.ranks import RegionLink
from engine.distributed.torch_group import OverNodes


class NodeRanks:
    """Ranks of other nodes: accepts them, and answers every rank's heartbeats until the group ends."""

    def __init__(self, nodes: NodeGroup, end: GroupEnd) -> None:
        """Start to listen; `end` is told of the first lost rank. Raises OSError, ConfigError."""
        self._heartbeats = HeartbeatServer(end.report)
        self._listener = NodeListener(nodes, self.serve)
        # However a rank was lost, no other may wait in a collective that can never complete.
        end.watch(lambda _lost: self._heartbeats.hang_up())
        end.watch(self._listener.fail)

    @property
    def host(self) -> str:
        return self._listener.host

    def serve(self, pulse: RankChannel) -> None:
        """Answer a rank's heartbeats on this channel from now on."""
        self._heartbeats.serve(pulse)

    def gather(self) -> dict[int, JoinedRank]:
        """Wait for all ranks of other nodes, then stop listening. Returns their connections, by rank.

        Raises RankLost.
        """
        try:
            return self._listener.gather()
        finally:
            self._listener.close()

    def over_nodes(self) -> OverNodes:
        """Means by which this rank's collectives reach other nodes."""
        return OverNodes(keys=self._heartbeats.keys, host=self._listener.host)

    def close(self) -> None:
        """Close all connections, which every rank notices; may be called twice."""
        self._listener.close()
        self._heartbeats.close()


class Channels:
    """A channel to every other rank, in order of rank. Used by one thread at a time, except `hang_up`."""

    def __init__(self) -> None:
        self._far_ends: list[socket.socket] = []
        self._all: dict[int, RankChannel] = {}
        self._elsewhere: set[int] = set()
        self.regions: dict[int, RegionLink] = {}
        """Connections to the servers of the ranks' KV regions, not read here; whoever uses one takes it out."""

    def open_pairs(
        self, ranks: Sequence[int], arrivals: NodeRanks | None, region_module: str | None = None
    ) -> list[RankCommand]:
        """Open socket pairs to ranks of this node. Returns the commands that start them with their ends.

        `region_module`: module that runs a rank and serves its KV region; None: nothing serves it.
        """
        return [self._open_pair(rank, arrivals, region_module) for rank in ranks]

    def add(self, joined: Mapping[int, JoinedRank], *, on_cut: Callable[[int], None] | None) -> None:
        """Add the connections to ranks of other nodes.

        `on_cut`: called with a rank whose connection for its KV region has ended; None: they serve none. Raises
        OSError, RuntimeError when there are no descriptors or threads left.
        """
        for rank, links in sorted(joined.items()):
            self._all[rank] = links.steps
            self._elsewhere.add(rank)
        with ExitStack() as left:
            for links in joined.values():
                left.callback(links.region.close)
            if on_cut is None:
                return
            for rank, links in sorted(joined.items()):
                self.regions[rank] = RegionLink(sock=links.region.into_socket(), on_cut=partial(on_cut, rank))
            left.pop_all()

    @property
    def elsewhere(self) -> Mapping[int, RankChannel]:
        """Channels to ranks of other nodes."""
        return {rank: self._all[rank] for rank in sorted(self._elsewhere)}

    def close_far_ends(self) -> None:
        """Close the ranks' ends, once their processes have them: then a rank's death closes its last copy."""
        for end in self._far_ends:
            end.close()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound the time that later calls wait for a rank, in seconds; None: no bound."""
        for channel in self._all.values():
            channel.set_timeout(timeout_s)

    def send(self, kind: ChannelKind, payload: bytes = b"") -> None:
        """Send the same payload to all."""
        for channel in self._all.values():
            channel.send(kind, payload)

    def send_each(self, kind: ChannelKind, payload: Callable[[int], bytes], *, fd: int | None) -> None:
        """Send each rank its own payload; `fd` goes to the ranks of this node."""
        for rank, channel in self._all.items():
            channel.send(kind, payload(rank), fd=None if rank in self._elsewhere else fd)

    def collect(self, kind: ChannelKind) -> Sequence[memoryview]:
        """Receive one message of this kind from each, in order of rank. Raises ConfigError when one refuses."""
        return [channel.expect(kind)[0] for channel in self._all.values()]

    def hang_up(self) -> None:
        """Shut the connections down, from any thread: a thread that waits for a rank wakes."""
        for channel in tuple(self._all.values()):  # another thread may add some
            channel.hang_up()

    def close(self) -> None:
        """Close all open ends."""
        self.close_far_ends()
        for channel in self._all.values():
            channel.close()
        for region in self.regions.values():
            region.sock.close()

    def _open_pair(self, rank: int, arrivals: NodeRanks | None, region_module: str | None) -> RankCommand:
        near, far = socket.socketpair()
        self._all[rank] = RankChannel(near, f"rank {rank}")
        self._far_ends.append(far)
        argv = [*(rank_command() if region_module is None else rank_command(region_module))]
        argv += ["--control-fd", str(far.fileno())]
        fds = [far.fileno()]
        if region_module is not None:
            near_region, far_region = socket.socketpair()
            self.regions[rank] = RegionLink(sock=near_region)
            self._far_ends.append(far_region)
            argv += ["--region-fd", str(far_region.fileno())]
            fds.append(far_region.fileno())
        if arrivals is not None:
            pulse, far_pulse = socket.socketpair()
            self._far_ends.append(far_pulse)
            arrivals.serve(RankChannel(pulse, f"rank {rank}"))
            argv += ["--pulse-fd", str(far_pulse.fileno()), "--host", arrivals.host]
            fds.append(far_pulse.fileno())
        return RankCommand(rank=rank, argv=argv, fds=fds)
