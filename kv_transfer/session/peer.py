"""The identity of this worker, and the route to a peer."""

from dataclasses import dataclass

from kv_transfer.layout.dtype_conversion import Floats
from kv_transfer.memory.region import KVRegion
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """This process, as its peers see it."""

    worker_id: WorkerId
    incarnation: Incarnation
    region: KVRegion
    head_scales: Floats | None = None
    """KV scales of the model, for fp8_e4m3: `[num_layers, 2, num_kv_heads]` of all ranks; 1 when absent."""

    @property
    def layout(self) -> KVLayout:
        return self.region.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The prefill worker that the router chose for one attempt."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its hand-off service."""
    attempt: int
