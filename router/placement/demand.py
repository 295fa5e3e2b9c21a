"""The input of placement: one choice's needs, what the workers hold of its prompt, how they are linked. Pure."""

from msgspec import Struct

from router.types.worker_view import WorkerKey
from router.workers.columns import Bools, PoolView, Slots
from router.workers.pair_links import PairLinks


class PlacementDemand(Struct, frozen=True, kw_only=True):
    """Requirements of one choice on its workers."""

    num_tokens: int
    """Tokens of the prompt and of earlier attempts' output, all of which need KV."""
    matched: Slots
    """Leading tokens whose KV a worker holds, by the worker's slot."""
    excluded: frozenset[WorkerKey] = frozenset()
    """Workers on which the choice has failed or was refused."""
    only: WorkerKey | None = None
    """The only worker that may be chosen, for anything; None: any."""
    pool_tokens_above: int = 0
    """Pool size, in tokens, of a worker that reported that the request can never fit there."""
    is_local: bool = False
    """Whether a decode worker should prefill it itself, whatever a hand-off costs: others wait for the prefill pool."""
    replicate_tokens: int = 0
    """Leading tokens of which another worker may have a copy: one that lacks them is not charged for computing them."""
    now_s: float = 0.0
    """Time on the clock by which penalties end."""
    links: PairLinks | None = None
    """The links between the workers of both pools; None: they make no difference."""
    adapter_ms: list[float] | None = None
    """[num_slots]: time until a worker has loaded the request's adapter, by the worker's slot; None: it has none."""

    def closed(self, pool: PoolView, needed_tokens: int) -> Bools | None:
        """Return the rows that may not be chosen, a pool of no more than `needed_tokens` included; None when all
        may."""
        closed = None if pool.open is None else ~pool.open
        if self.only is not None:
            others = ~pool.members.none()
            if (row := pool.members.rows.get(self.only)) is not None:
                others[row] = False
            closed = others if closed is None else closed | others
        if self.excluded:
            for key in self.excluded:
                if (row := pool.members.rows.get(key)) is not None:
                    closed = pool.members.none() if closed is None else closed
                    closed[row] = True
        if pool.members.least_pool_tokens <= needed_tokens:
            small = pool.members.pool_tokens <= needed_tokens
            closed = small if closed is None else closed | small
        if self.adapter_ms is not None and pool.members.no_adapters is not None:
            closed = pool.members.no_adapters if closed is None else closed | pool.members.no_adapters
        return closed
