"""Room on this machine's GPUs beside its running workers."""

import sys

import pytest
import torch

from cluster.control.gpu_room import has_room, workers_without_room
from cluster.supervisor.process_view import ProcessView
from cluster.supervisor.supervisor import ProcessState, Role
from tandem.config.cluster import load

ON_TWO = {"num_gpus": 2, "weights_bytes": 100, "kv_bytes": 60}


def view(name, ready):
    return ProcessView(name=name, role=Role.DECODE, state=ProcessState.READY, pid=1, address="127.0.0.1:1", ready=ready)


@pytest.mark.parametrize(
    ("free", "fits"),
    [([100, 100], True), ([100, 99], False), ([99, 100], False), ([100, 100, 0], True), ([1000], False), ([], False)],
)
def test_gpu_room_successor_needs_the_same_memory_per_gpu(free, fits):
    assert has_room(ON_TWO, load(None), free) is fits


def test_gpu_room_uses_stated_memory():
    config = load(None, {"engine.memory_bytes": 400})
    assert has_room(ON_TWO, config, [200, 200])
    assert not has_room(ON_TWO, config, [200, 199])


def test_gpu_room_successor_needs_full_share_on_named_gpus():
    ready = ON_TWO | {"gpus": [3, 1], "gpu_sharers": 2, "memory_bytes": 240}
    assert has_room(ready, load(None), [0, 120, 0, 120])
    assert not has_room(ready, load(None), [120, 119, 120, 120])
    assert not has_room(ready, load(None), [120, 120, 120])


async def test_gpu_room_is_queried_only_for_gpu_workers_and_tolerates_failure(tmp_path):
    queried = tmp_path / "asked"
    command = (sys.executable, "-c", f"open({str(queried)!r}, 'w'); print([99, 300])")
    config = load(None)
    assert await workers_without_room([view("a", {}), view("b", {"num_gpus": 0})], config, command) == frozenset()
    assert not queried.exists()
    small = {"num_gpus": 1, "weights_bytes": 50, "kv_bytes": 20}
    assert await workers_without_room([view("a", ON_TWO), view("b", small), view("c", {})], config, command) == {"a"}
    assert queried.exists()
    for answer in ("raise SystemExit(1)", "print('none')", "print(5)"):
        assert await workers_without_room([view("a", ON_TWO)], config, (sys.executable, "-c", answer)) == frozenset()


@pytest.mark.slow
async def test_gpu_room_query_sees_the_worker_gpus():
    """Without a GPU on this machine it sees none, and a GPU worker has no room."""
    full = await workers_without_room([view("a", {"num_gpus": torch.cuda.device_count() + 1})], load(None))
    assert full == {"a"}
