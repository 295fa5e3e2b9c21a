"""A worker's share of GPU memory, and its error when that is not available."""

from dataclasses import replace

import pytest
import torch

from engine import assembly
from engine.distributed.ranks import follower
from engine.distributed.ranks.messages import RankSetup
from engine.model import gpu_memory
from engine.model.gpu_memory import GpuMemory, GpuMemoryRequest, granted_bytes
from tandem.errors import ConfigError
from tests.unit.engine.distributed.ranks.test_messages import SETUP
from tests.unit.engine.test_assembly import SPEC

GIB = 1 << 30
H200 = GpuMemory(name="NVIDIA H200", free_bytes=139 * GIB, total_bytes=140 * GIB)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """An empty GPU; returns the devices that were queried."""
    requested: list[torch.device] = []

    def read(device: torch.device) -> GpuMemory:
        requested.append(device)
        return H200

    monkeypatch.setattr(gpu_memory, "read_gpu", read)
    return requested


@pytest.mark.parametrize(("sharers", "gib"), [(1, 112), (2, 56), (8, 14)])
def test_gpu_memory_sharers_split_80_percent_evenly(sharers: int, gib: int, gpu: list[torch.device]) -> None:
    assert assembly._limit_bytes(replace(SPEC, memory_bytes=None, gpu_sharers=sharers), CUDA) == gib * GIB
    assert set(gpu) == {CUDA}


def test_gpu_memory_share_is_independent_of_start_order() -> None:
    own = GpuMemoryRequest(index=0, sharers=2)
    taken = replace(H200, free_bytes=60 * GIB)
    assert own.limit_bytes(H200) == own.limit_bytes(taken) == 56 * GIB
    assert own.shortage(taken) is None


def test_gpu_memory_stated_size_covers_all_ranks_and_must_fit(gpu: list[torch.device]) -> None:
    spec = replace(SPEC, memory_bytes=90 * GIB, tensor_parallel_size=2, gpu_sharers=3)
    assert assembly._limit_bytes(spec, CUDA) == 45 * GIB
    with pytest.raises(ConfigError, match=r"GPU 5 \(NVIDIA H200\): engine\.memory_bytes wants 45\.0 GiB for each of 4"):
        assembly._limit_bytes(replace(spec, gpu_sharers=4, gpus=(5, 6)), CUDA)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            GpuMemoryRequest(index=3),
            r"GPU 3 \(NVIDIA H200\): this worker wants 112\.0 GiB \(80 % of it\); 20\.0 GiB of 140\.0 GiB",
        ),
        (
            GpuMemoryRequest(index=0, sharers=2),
            r"wants 56\.0 GiB \(80 % of it, divided by 2\); 20\.0 GiB of 140\.0 GiB are free",
        ),
        (
            GpuMemoryRequest(index=0, configured_bytes=21 * GIB),
            r"wants 21\.0 GiB \(engine\.memory_bytes\); 20\.0 GiB of",
        ),
    ],
)
def test_gpu_memory_shortage_names_gpu_wanted_and_free(own: GpuMemoryRequest, words: str) -> None:
    waited: list[float] = []
    short = replace(H200, free_bytes=20 * GIB)
    with pytest.raises(ConfigError, match=words):
        granted_bytes(own, lambda: short, patience_s=2.0, wait=waited.append)
    assert sum(waited) == 2.0


def test_gpu_memory_waits_for_memory_of_dead_process() -> None:
    seen = [replace(H200, free_bytes=20 * GIB)] * 3
    found = granted_bytes(GpuMemoryRequest(index=0), lambda: seen.pop() if seen else H200, wait=lambda _s: None)
    assert (found, seen) == (112 * GIB, [])


def test_gpu_memory_rank_uses_share_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[GpuMemoryRequest, torch.device]] = []
    monkeypatch.setattr(follower, "gpu_limit_bytes", lambda own, device: requested.append((own, device)) or 7)
    backend = replace(SETUP.backend, device=CUDA)
    setup = replace(SETUP, backend=backend, gpus=(4, 5, 6, 7), gpu_sharers=2, configured_bytes=9)
    there = RankSetup.from_json(memoryview(setup.of_rank(3).to_json()))
    assert follower._limit_bytes(there, there.backend.device) == 7
    assert requested == [(GpuMemoryRequest(index=7, sharers=2, configured_bytes=9), torch.device("cuda", 3))]
    elsewhere = replace(setup, num_nodes=2, gpus=(0, 1)).of_rank(3)
    assert elsewhere.gpu_memory_request.index == 1


def test_gpu_memory_log_names_gpu_and_share(gpu: list[torch.device], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        gpu_memory.gpu_limit_bytes(GpuMemoryRequest(index=2, sharers=2), CUDA)
    assert "GPU 2 (NVIDIA H200): takes up to 56.0 GiB of 140.0 GiB, as does each of 2 workers" in caplog.text
