"""What NIXL is told about memory on a GPU, over a fake of its bindings and a pool that claims to be on one."""

import importlib
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.transports import dial
from kv_transfer.transports.catalogue import reaches_device
from kv_transfer.transports.nixl import agent as nixl_agent
from kv_transfer.transports.nixl.agent import AgentMemory, NixlAgent, problem
from kv_transfer.transports.nixl.receiver import NixlReceiver, address_of, is_on_device, pack_pool, unpack_pool
from kv_transfer.transports.nixl.sender import NixlSender
from tandem.errors import TransferError
from tests.support.kv_transfer.transport_peer import LAYOUT, NUM_BLOCKS

DRAM, VRAM = "DRAM_SEG", "VRAM_SEG"
HERE = AgentMemory(base=0x7000_0000_0000, size_bytes=1 << 20, gpu=3)
PEER_HOST = AgentMemory(base=0x1000, size_bytes=1 << 20)
PEER_GPU = AgentMemory(base=0x2000, size_bytes=1 << 20, gpu=1)
GRAIN = 4096


class BindingsError(Exception):
    pass


class RecordingAgent:
    """Records the memory that it is told of as (segment, device id, ...)."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: None

    def getAvailPlugins(self) -> list[str]:
        return ["UCX"]

    def createBackend(self, name: str, options: dict[str, str]) -> str:
        self._calls.append(("backend", name, options, os.environ["UCX_TLS"]))
        return "backend"

    def registerMem(self, regions: tuple[str, Any], _backends: object) -> None:
        self._calls.append(("register", *regions))

    def loadRemoteMD(self, _metadata: bytes) -> bytes:
        return b"peer"

    def prepXferDlist(self, name: str, segment: str, rows: np.ndarray, _backends: object) -> int:
        self._calls.append(("prepare", name, segment, rows.tolist()))
        return len(self._calls)

    def makeXferReq(self, *_args: object) -> int:
        return 1

    def createXferReq(self, _kind: str, here: object, there: object, *_rest: object) -> int:
        self._calls.append(("describe", here, there))
        return 2


class GpuPool(TorchPool):
    """Claims to be on GPU 3 of this process."""

    cuda_index = 3  # type: ignore[assignment]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    names = ("NIXL_WRITE", "NIXL_INIT_AGENT", "NIXL_IN_PROG", "NIXL_THREAD_SYNC_STRICT", DRAM, VRAM)
    bindings = SimpleNamespace(
        **{name: name for name in names},
        nixlBackendError=BindingsError,
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda _name, _config: RecordingAgent(calls),
        nixlRegDList=lambda segment, regions: (segment, regions),
        nixlXferDList=lambda segment, rows: (segment, rows.tolist()),
    )
    really = importlib.import_module
    load = lambda name: bindings if name == "nixl._bindings" else really(name)  # noqa: E731
    monkeypatch.setattr(nixl_agent.importlib, "import_module", load)
    monkeypatch.delenv("UCX_TLS", raising=False)
    return calls


def gpu_region() -> KVRegion:
    memory = torch.zeros(NUM_BLOCKS * LAYOUT.region_block_bytes, dtype=torch.uint8)
    return KVRegion.on_device(GpuPool(memory, LAYOUT))


def test_nixl_agent_registers_pool_of_a_gpu_as_device_memory(calls: list[tuple[Any, ...]]) -> None:
    region = gpu_region()
    assert region.device is not None
    NixlAgent("a", AgentMemory.of_region(region), loopback=True)
    size_bytes = NUM_BLOCKS * LAYOUT.region_block_bytes
    assert calls[-1] == ("register", VRAM, [(region.device.memory.data_ptr(), size_bytes, 3, "")])


def test_nixl_agent_registers_host_memory_and_pools_on_the_cpu_as_such(calls: list[tuple[Any, ...]]) -> None:
    memory = torch.zeros(NUM_BLOCKS * LAYOUT.region_block_bytes, dtype=torch.uint8)
    for region in (KVRegion.on_device(TorchPool(memory, LAYOUT)), KVRegion.from_buffer(memory.numpy().data, LAYOUT)):
        NixlAgent("a", AgentMemory.of_region(region), loopback=False)
        assert calls[-1] == ("register", DRAM, [(memory.data_ptr(), memory.numel(), 0, "")])


def test_nixl_agent_keeps_ucx_from_lanes_that_nobody_can_shut_out(calls: list[tuple[Any, ...]]) -> None:
    NixlAgent("a", HERE, loopback=True)
    NixlAgent("b", HERE, loopback=False)
    backends = [call[1:] for call in calls if call[0] == "backend"]
    assert backends == [("UCX", {"engine_config": "NET_DEVICES=lo"}, "^sm,cuda_ipc"), ("UCX", {}, "^sm,cuda_ipc")]


@pytest.mark.parametrize(("peer", "segment", "gpu"), [(PEER_HOST, DRAM, 0), (PEER_GPU, VRAM, 1)])
def test_nixl_agent_names_kind_and_gpu_of_each_side(
    calls: list[tuple[Any, ...]], peer: AgentMemory, segment: str, gpu: int
) -> None:
    agent = NixlAgent("a", HERE, loopback=True)
    agent.add_remote(b"metadata", peer)
    agent.post([(0, GRAIN, GRAIN)], GRAIN)
    assert [call[1:] for call in calls if call[0] == "prepare"] == [
        ("NIXL_INIT_AGENT", VRAM, [[HERE.base, GRAIN, 3, GRAIN, HERE.size_bytes // GRAIN]]),
        ("peer", segment, [[peer.base, GRAIN, gpu, GRAIN, peer.size_bytes // GRAIN]]),
    ]
    agent.post([(1, 2, 3), (5, 6, 7)], GRAIN)
    here = (VRAM, [[HERE.base + 1, 3, 3], [HERE.base + 5, 7, 3]])
    assert calls[-1] == ("describe", here, (segment, [[peer.base + 2, 3, gpu], [peer.base + 6, 7, gpu]]))


@pytest.mark.parametrize("lanes", ["all", "tcp,sm", "cuda,rc", "rc,cuda_ipc", "^sm", "^cuda_ipc", "tcp,\\posix"])
def test_nixl_agent_refuses_lanes_of_the_environment_that_nobody_can_shut_out(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    with pytest.raises(TransferError, match="UCX_TLS"):
        NixlAgent("a", HERE, loopback=True)
    assert "UCX_TLS" in (problem() or "")
    assert not calls


@pytest.mark.parametrize("lanes", ["tcp", "rc,cuda_copy,tcp", "^cuda,shm", "^sm,cuda_ipc,ud"])
def test_nixl_agent_accepts_guarded_lanes_of_the_environment(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    NixlAgent("a", HERE, loopback=True)
    assert calls[0][-1] == lanes


def test_nixl_problem_probes_memory_of_the_pools_gpu(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpu_region().device
    assert problem(device) is None
    assert [(call[1], call[2][0][2]) for call in calls if call[0] == "register"] == [(VRAM, 3)]

    def refuse(*_args: object) -> None:
        raise BindingsError("no CUDA in this UCX")

    monkeypatch.setattr(RecordingAgent, "registerMem", refuse)
    assert "with the memory of GPU 3: NIXL: BindingsError: no CUDA in this UCX" in (problem(device) or "")


def test_nixl_offer_of_a_device_is_unreadable_for_older_writers() -> None:
    """They dial the advert as it is, and take the next transport when that fails."""
    region = gpu_region()
    for receiver, on_device in ((NixlReceiver(region), True), (NixlReceiver(host_region()), False)):
        offer = receiver.offer()
        try:
            assert is_on_device(offer) is on_device
            assert reaches_device([offer]) is on_device
            assert dial.is_loopback_advert(address_of(offer))
            assert NixlSender(region).reaches(offer)
            assert dial.is_loopback_advert(offer.advert) is not on_device
            if on_device:
                with pytest.raises(TransferError, match="not the advert"):
                    dial.dial(offer.advert)
        finally:
            receiver.close()


def host_region() -> KVRegion:
    return KVRegion.from_buffer(memoryview(bytearray(NUM_BLOCKS * LAYOUT.region_block_bytes)), LAYOUT)


@pytest.mark.parametrize("memory", [PEER_HOST, PEER_GPU, AgentMemory(base=5, size_bytes=6, gpu=0)])
def test_nixl_pool_description_round_trip(memory: AgentMemory) -> None:
    assert unpack_pool(pack_pool(memory, on_device=True) + b"metadata", on_device=True) == (b"metadata", memory)
    with pytest.raises(TransferError):
        unpack_pool(pack_pool(memory, on_device=True), on_device=True)


def test_nixl_pool_description_of_host_memory_is_as_before() -> None:
    packed = pack_pool(PEER_HOST, on_device=False)
    assert packed == PEER_HOST.base.to_bytes(8, "big") + PEER_HOST.size_bytes.to_bytes(8, "big")
    assert unpack_pool(packed + b"metadata", on_device=False) == (b"metadata", PEER_HOST)
