"""What rank 0 has beside its connections when ranks come from other nodes: the door, and who lives."""

from engine.distributed.links.channel import Channel
from engine.distributed.links.heartbeat import PulseDesk
from engine.distributed.links.listener import NodeDoor
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.torch_group import OverNodes


class Arrivals:
    """From the open door to the group's end."""

    def __init__(self, nodes: NodeGroup, end: GroupEnd) -> None:
        """Listens at once. `end` is told of a rank that is gone. Raises OSError, ConfigError."""
        self._desk = PulseDesk(end.tell)
        self._door = NodeDoor(nodes, self.serve)
        # However a rank went: nobody else is left in a sum that will never be whole.
        end.watch(lambda _lost: self._desk.hang_up())
        end.watch(self._door.fail)

    @property
    def host(self) -> str:
        """This node's address."""
        return self._door.host

    def serve(self, pulse: Channel) -> None:
        """One more rank asks whether this one lives."""
        self._desk.serve(pulse)

    def gather(self) -> dict[int, Channel]:
        """Wait for all ranks of other nodes, then listen no longer. Raises RankLost."""
        try:
            return self._door.gather()
        finally:
            self._door.close()

    def over_nodes(self) -> OverNodes:
        """How this rank meets the others."""
        return OverNodes(keys=self._desk.keys, host=self._door.host)

    def close(self) -> None:
        """Every rank sees the end. Twice does no harm."""
        self._door.close()
        self._desk.close()
