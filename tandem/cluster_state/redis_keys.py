"""The keys that Tandem uses in Redis.

All begin with the cluster's name: `workers` and `routers`, sorted sets of recently active processes, and for each of
these processes values of its own that expire with its lease. A worker's keys belong to one process of it: a restarted
worker uses new ones.
"""

from tandem.cluster_state.entries import Process
from tandem.values.ids import Incarnation

FORGET_MS = 3_600_000
"""Members whose time is this far in the past or in the future are removed from the sorted sets."""


class ClusterStateKeys:
    """The keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        # Braces: in a Redis Cluster all keys of one cluster are in one slot, as transactions require.
        self._root = f"{{tandem:{cluster}}}"
        self.workers = f"{self._root}:workers"
        self.routers = f"{self._root}:routers"

    def notice(self, process: Process) -> str:
        """A worker's registration (address, role, model), which expires with its lease."""
        return f"{self._root}:worker:{process.mark}"

    def head(self, process: Process) -> str:
        """The extent of the entries about a worker's cache (`Footprint`)."""
        return f"{self._root}:head:{process.mark}"

    def state(self, process: Process) -> str:
        """A snapshot of a worker's cache: every block name at one moment."""
        return f"{self._root}:state:{process.mark}"

    def log(self, process: Process) -> str:
        """A stream of changes of a worker's cache since the snapshot; an entry's id is the sequence number after it."""
        return f"{self._root}:log:{process.mark}"

    def load(self, router: Incarnation) -> str:
        """The load that a router has placed on each worker, which expires with its lease."""
        return f"{self._root}:load:{router:x}"
