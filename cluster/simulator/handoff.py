"""One prompt's KV on its way from a prefill worker to a decode worker."""

from dataclasses import dataclass

from cluster.simulator.sim_request import SimRequest
from router.worker_view import WorkerKey
from tandem.ids import TransferId


@dataclass(slots=True, kw_only=True)
class Handoff:
    """Mutated by the simulated workers alone."""

    request: SimRequest
    transfer_id: TransferId
    decode: WorkerKey
    prefill: WorkerKey
    num_held_blocks: int
    """That the decode worker has: they do not travel."""
    is_bound: bool = False
    """The decode worker has chosen its blocks and said so."""
    num_computed_blocks: int = 0
    is_computed: bool = False
    """The whole prompt is."""
    _num_sent_blocks: int = 0

    def take_computed(self) -> int:
        """Blocks that may leave now, told once."""
        first = max(self.num_held_blocks, self._num_sent_blocks)
        self._num_sent_blocks = max(first, self.num_computed_blocks)
        return self._num_sent_blocks - first
