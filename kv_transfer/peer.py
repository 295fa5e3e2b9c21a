"""Who this worker is, and how it reaches a peer."""

from dataclasses import dataclass

from kv_transfer.transport import KVRegion
from tandem.ids import Incarnation, WorkerId
from tandem.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """This process, as its peers see it."""

    worker_id: WorkerId
    incarnation: Incarnation
    layout: KVLayout
    region: KVRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The prefill worker that the router chose for one attempt."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its hand-off service."""
    attempt: int
