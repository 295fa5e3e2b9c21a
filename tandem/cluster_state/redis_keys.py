"""The keys in Redis: where on the board everything stands.

Under one cluster's name: `workers` and `routers`, sorted sets of who was there lately; and for each of those a value of
its own that ends with its lease. Whatever is of a worker is of one process of it: a restarted worker starts afresh.
"""

from tandem.cluster_state.entries import Process
from tandem.values.ids import Incarnation

FORGET_MS = 3_600_000
"""Members whose time is this far in the past or in the future are removed from the sorted sets."""


class ClusterStateKeys:
    """The keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        # Braces: in a Redis Cluster all keys of one cluster lie in one slot, as transactions need.
        self._root = f"{{tandem:{cluster}}}"
        self.workers = f"{self._root}:workers"
        self.routers = f"{self._root}:routers"

    def notice(self, process: Process) -> str:
        """Leased: the process is here."""
        return f"{self._root}:worker:{process.mark}"

    def head(self, process: Process) -> str:
        """What there is of its cache."""
        return f"{self._root}:head:{process.mark}"

    def state(self, process: Process) -> str:
        """All that it held at one moment."""
        return f"{self._root}:state:{process.mark}"

    def log(self, process: Process) -> str:
        """A stream of what has changed; an entry's id is the number of the change after it."""
        return f"{self._root}:log:{process.mark}"

    def load(self, router: Incarnation) -> str:
        """Leased: what the router has under way."""
        return f"{self._root}:load:{router:x}"
