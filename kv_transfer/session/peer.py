"""The identity of this worker, and the route to a peer."""

from dataclasses import dataclass

from kv_transfer.layout.dtype_conversion import Floats
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """This process, as its peers see it."""

    worker_id: WorkerId
    incarnation: Incarnation
    layout: KVLayout
    num_blocks: int
    """Number of blocks of the pool, the same in each of its regions."""
    head_scales: Floats | None = None
    """KV scales of the model, for fp8_e4m3: `[num_layers, 2, num_kv_heads]` of all ranks; 1 when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The prefill worker that the router chose for one attempt."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its hand-off service."""
    attempt: int
