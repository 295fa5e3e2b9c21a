"""Edges of a large graph as arrays, grouped by the node at one of their ends."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Edges:
    """Edges from numbered nodes; `kinds` is whatever else is known of each."""

    def __init__(self, sources: Numbers, targets: Numbers, kinds: Numbers, num_nodes: int) -> None:
        order = np.argsort(sources, kind="stable")
        self.targets, self.kinds = targets[order], kinds[order]
        self._first = np.concatenate(([0], np.cumsum(np.bincount(sources, minlength=num_nodes))))

    def of(self, nodes: Numbers) -> tuple[Numbers, Numbers]:
        """(position in `nodes`, number of the edge) of every edge from these nodes."""
        counts = self._first[nodes + 1] - self._first[nodes]
        which = np.repeat(np.arange(len(nodes)), counts)
        return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + self._first[nodes][which]

    def reached(self, nodes: Numbers) -> NDArray[np.bool_]:
        """Every node to which these lead, themselves included."""
        reached = np.zeros(len(self._first) - 1, dtype=bool)
        reached[nodes] = True
        while len(nodes):
            nodes = np.unique(self.targets[self.of(nodes)[1]])
            nodes = nodes[~reached[nodes]]
            reached[nodes] = True
        return reached
