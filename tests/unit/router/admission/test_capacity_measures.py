"""The room of few workers, measured one by one, equals what columns measure of the same workers."""

from itertools import product
from random import Random

import pytest

from router.admission import cluster_capacity
from router.admission.cluster_capacity import CapacityPolicy, ClusterCapacity, InTransit, measure_capacity
from router.placement.costs import CostModel
from router.types.worker_view import WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.columns import ClusterView
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tests.support.router.worker_views import LAYOUT, view_of

_NOW_S = 0.25


def _worker(name: str, role: WorkerRole, rng: Random, *, is_plain: bool) -> WorkerSnapshot:
    """A worker under random load; a plain one is never closed, penalised or without rates."""
    rare = 0.0 if is_plain else 0.3
    load = WorkerLoad(
        num_running=rng.choice([0, 1, 5, 300]),
        num_free_blocks=rng.randrange(1000),
        prefill_tokens_per_s=0.0 if rng.random() < rare else rng.uniform(100.0, 9000.0),
        decode_step_s=0.0 if rng.random() < rare else rng.uniform(0.01, 0.2),
        kv_bytes_per_s=0.0 if rng.random() < rare else rng.uniform(1e8, 1e10),
    )
    info = WorkerInfo(
        key=WorkerKey(WorkerId(name), Incarnation(1)),
        role=role,
        model_name="toy",
        max_model_len=4096,
        num_blocks=rng.choice([500, 1000]),
        layout=LAYOUT,
        handoff_address="" if rng.random() < rare else f"{name}:1",
    )
    return WorkerSnapshot(
        info=info,
        load=load,
        backlog_tokens=rng.choice([0, rng.randrange(300), rng.randrange(20_000)]),
        num_active=rng.choice([0, load.num_running, rng.randrange(300)]),
        draining=rng.random() < rare,
        # Some penalties are over by now.
        penalty_ms=rng.choice([0.0, 100.0, 500.0]) if rng.random() < rare else 0.0,
    )


def _view(rng: Random, *, num_decode: int, num_prefill: int) -> ClusterView:
    is_plain = rng.random() < 0.3
    decode = [_worker(f"d{n}", WorkerRole.DECODE, rng, is_plain=is_plain) for n in range(num_decode)]
    prefill = [_worker(f"p{n}", WorkerRole.PREFILL, rng, is_plain=is_plain) for n in range(num_prefill)]
    return view_of(decode + prefill)


def _measured(most: int, view: ClusterView, policy: CapacityPolicy, transit: InTransit) -> ClusterCapacity:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_capacity, "MAX_MEASURED_SINGLY", most)
        return measure_capacity(view, policy, transit, _NOW_S)


def test_capacity_measured_singly_equals_that_by_columns() -> None:
    rng, most = Random(17), cluster_capacity.MAX_MEASURED_SINGLY
    kinds = set()
    for num_decode, num_prefill in product(range(most + 1), repeat=2):
        for _ in range(25):
            view = _view(rng, num_decode=num_decode, num_prefill=num_prefill)
            policy = CapacityPolicy(
                max_running_per_worker=rng.choice([1, 8, 256]),
                max_itl_s=rng.choice([None, 0.05, 0.1]),
                costs=rng.choice([None, CostModel(), CostModel(max_local_prefill_tokens=300)]),
            )
            transit = InTransit(
                num_requests=rng.randrange(4), work_tokens=rng.choice([0.0, 77.7, 9e9]), local_tokens=rng.random()
            )
            singly, by_columns = _measured(most, view, policy, transit), _measured(-1, view, policy, transit)
            assert singly == by_columns  # to the last bit
            kinds.add((singly.usable, singly.decode_reads, singly.local is None, singly.slots > 0))
    assert len(kinds) == 8
