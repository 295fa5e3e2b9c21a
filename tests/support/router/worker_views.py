"""Snapshots of workers as placement sees them, for tests that make clusters up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from router.placement.demand import PlacementDemand
from router.types.session_events import WorkerPort
from router.types.worker_view import WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.columns import ClusterView
from router.workers.peer_load import PeerShare
from router.workers.record import WorkerRecord, WorkerTable
from tandem.protocol.session_versions import SPOKEN
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.roles import WorkerRole

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)


class Port:
    """The way to a worker that is not there: remembers what it was asked for."""

    def __init__(self) -> None:
        self.num_resyncs = 0

    def resync(self) -> None:
        self.num_resyncs += 1


def port() -> WorkerPort:
    return cast(WorkerPort, Port())


def worker(
    name: str,
    *,
    load: WorkerLoad | None = None,
    backlog: int = 0,
    active: int = 0,
    num_blocks: int = 1000,
    layout: KVLayout = LAYOUT,
    transports: frozenset[str] = frozenset(),
    version: int = SPOKEN.newest,
    **fields: Any,
) -> WorkerSnapshot:
    """A prefill worker when its name begins with p, else a decode worker; `fields`: of the snapshot."""
    prefill = name.startswith("p")
    info = WorkerInfo(
        key=WorkerKey(WorkerId(name), Incarnation(1)),
        role=WorkerRole.PREFILL if prefill else WorkerRole.DECODE,
        model_name="toy",
        max_model_len=4096,
        num_blocks=num_blocks,
        layout=layout,
        handoff_address=f"{name}:1" if prefill else "",
        transports=transports,
        protocol_version=version,
    )
    load = load or WorkerLoad(num_free_blocks=num_blocks)
    return WorkerSnapshot(info=info, load=load, backlog_tokens=backlog, num_active=active, **fields)


def record_of(snapshot: WorkerSnapshot, slot: int) -> WorkerRecord:
    """A live worker that looks like this at second 0."""
    record = WorkerRecord(snapshot.info, port(), slot=slot, now_s=snapshot.answered_s)
    show(record, snapshot)
    record.penalised(snapshot.penalty_ms / 1e3)
    if snapshot.draining:
        record.drains()
    return record


def show(record: WorkerRecord, snapshot: WorkerSnapshot) -> None:
    """Give a live worker, to which this router has sent nothing, this load."""
    peers = PeerShare(backlog_tokens=snapshot.backlog_tokens, num_requests=snapshot.num_active)
    record.reported(snapshot.load, peers)


def view_of(workers: Sequence[WorkerSnapshot]) -> ClusterView:
    """The cluster of just these."""
    return WorkerTable([record_of(snapshot, slot) for slot, snapshot in enumerate(workers)]).view()


def demand_of(
    view: ClusterView, num_tokens: int, *excluded: WorkerSnapshot, matched: Mapping[str, int], **fields: Any
) -> PlacementDemand:
    """What a choice needs, with who holds what by name."""
    return PlacementDemand(
        num_tokens=num_tokens,
        matched=view.matched({WorkerId(name): tokens for name, tokens in matched.items()}),
        excluded=frozenset(w.info.key for w in excluded),
        **fields,
    )


Wanted = Callable[[ClusterView], PlacementDemand]
"""What a choice needs, once it is known of which workers."""


def demand(num_tokens: int = 500, *excluded: WorkerSnapshot, only: WorkerKey | None = None, **matched: int) -> Wanted:
    return lambda view: demand_of(view, num_tokens, *excluded, matched=matched, only=only)
