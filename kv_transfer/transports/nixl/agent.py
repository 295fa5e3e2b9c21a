"""A NIXL agent with UCX, and the memory that it may read or write. The only module that imports nixl.

Each connection has an agent of its own on either side, so that ending it affects no other. Releasing a transfer or
deregistering memory stops no transfer (see docs/extend/adr: UCX over TCP wrote into memory that its owner had
deregistered, and read on from sources whose transfer was released). Ending the agent does: its endpoints, queue pairs
and memory keys go with it.

UCX's shared-memory transports and its cuda_ipc are excluded: there the writing process copies by itself, whatever the
other side has closed. They are excluded by an environment variable, since NIXL splits its own option at commas.
"""

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from kv_transfer.layout.runs import RunPair
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.transports.same_host import has_rdma
from tandem.errors import TransferError

BACKEND = "UCX"
_LANES = "UCX_TLS"
_GUARDED_LANES = "^sm,cuda_ipc"
_UNGUARDED = frozenset({"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "cuda", "cuda_ipc"})
"""Names of UCX by which a lane that nobody can shut out is allowed."""
_SHARED_MEMORY, _CUDA_IPC = frozenset({"sm", "shm"}), frozenset({"cuda", "cuda_ipc"})
_LOOPBACK = "NET_DEVICES=lo"
_POLL_US = 100_000
"""Longest sleep of an idle agent's thread, in microseconds; incoming bytes wake it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 2e-3


def _prepare_environment() -> None:
    """Set the environment variables that UCX reads, unless they are set already.

    Without an RDMA device UCX's InfiniBand module is useless, and one of its libraries, together with the system's
    copy, kills the process at exit. UCX's messages go to stderr, apart from the program's output.
    """
    if not has_rdma():
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault(_LANES, _GUARDED_LANES)
    if not _is_guarded(os.environ[_LANES]):
        raise TransferError(
            f"{_LANES}={os.environ[_LANES]} lets UCX write through shared memory or cuda_ipc, which no receiver can"
            f" stop; unset it, or exclude both as in {_GUARDED_LANES}"
        )


def _is_guarded(lanes: str) -> bool:
    """Whether a value of UCX_TLS excludes shared memory and cuda_ipc."""
    names = frozenset(name.strip().lstrip("\\") for name in lanes.removeprefix("^").split(","))
    if lanes.startswith("^"):
        return bool(names & _SHARED_MEMORY) and bool(names & _CUDA_IPC)
    return not names & _UNGUARDED


_PROBE_BYTES = 4096


def problem(device: DevicePool | None = None) -> str | None:
    """Reason why NIXL cannot work here, or cannot reach the memory of this device; None when it can."""
    try:
        if device is None:
            memory = AgentMemory.on_host(memoryview(bytearray(_PROBE_BYTES)))
        else:
            memory = AgentMemory.beside(device, _PROBE_BYTES)
        NixlAgent("tandem-probe", memory, loopback=True).close()
    except ImportError as error:
        return f"needs the package nixl: `pip install '.[nixl]'` ({error})"
    except (TransferError, OSError) as error:
        where = "here" if device is None or device.cuda_index is None else f"with the memory of GPU {device.cuda_index}"
        return f"needs the package nixl, which does not work {where}: {error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMemory:
    """Memory that an agent registers, or that it writes into at a peer."""

    base: int
    """Address of the first byte in its process."""
    size_bytes: int
    gpu: int | None = None
    """CUDA index of the GPU that has it, as its process counts them; None for host memory."""
    owner: object = field(default=None, repr=False)
    """What the memory belongs to, kept alive; None for a peer's."""

    @classmethod
    def on_host(cls, buffer: memoryview) -> "AgentMemory":
        """Host memory, which must not be empty."""
        array = np.frombuffer(buffer, np.uint8)
        return cls(base=int(array.ctypes.data), size_bytes=array.nbytes, owner=array)

    @classmethod
    def of_region(cls, region: KVRegion) -> "AgentMemory":
        """A pool, wherever it is."""
        device = region.device
        if device is None:
            return cls.on_host(region.buffer)
        size_bytes = device.num_blocks * device.layout.region_block_bytes
        return cls(base=device.address, size_bytes=size_bytes, gpu=device.cuda_index, owner=device)

    @classmethod
    def beside(cls, device: DevicePool, num_bytes: int) -> "AgentMemory":
        """New memory of a pool's device. Raises TransferError when there is none left."""
        tensor = device.blank(num_bytes)
        return cls(base=int(tensor.data_ptr()), size_bytes=num_bytes, gpu=device.cuda_index, owner=tensor)


class NixlAgent:
    """Agent for one peer; one thread at a time, except `close`. Raises ImportError without nixl, TransferError when
    NIXL fails."""

    def __init__(self, name: str, memory: AgentMemory, *, loopback: bool) -> None:
        _prepare_environment()
        self._nixl = importlib.import_module("nixl._bindings")
        self._errors = _errors_of(self._nixl)
        self._memory = memory
        self._lock = threading.Lock()
        self._agent: Any = None
        self._lists: dict[int, tuple[int, int]] = {}
        self._remote: tuple[str, AgentMemory] | None = None
        with self._translated():
            agent = self._nixl.nixlAgent(name, self._config())
            if BACKEND not in agent.getAvailPlugins():
                raise TransferError(f"NIXL has no {BACKEND} backend")
            self._backend = agent.createBackend(BACKEND, {"engine_config": _LOOPBACK} if loopback else {})
            whole = (memory.base, memory.size_bytes, memory.gpu or 0, "")
            self._registered = self._nixl.nixlRegDList(self._segment(memory), [whole])
            agent.registerMem(self._registered, [self._backend])
            self._agent = agent

    def metadata(self) -> bytes:
        """UCX addresses and memory keys, which a peer needs to reach this memory."""
        with self._translated():
            return bytes(self._agent.getLocalMD())

    def add_remote(self, metadata: bytes, memory: AgentMemory) -> None:
        """Load the peer's metadata and note where its memory is."""
        with self._translated():
            name = self._agent.loadRemoteMD(metadata)
            self._remote = (name.decode() if isinstance(name, bytes) else str(name), memory)

    def post(self, copies: Sequence[RunPair], grain_bytes: int) -> int:
        """Start to write these copies into the peer's memory; returns a handle to be passed to `wait` once.

        Copies of whole grains are named by index in lists that are prepared once.
        """
        with self._translated():
            request = self._indexed(copies, grain_bytes) if _whole(copies, grain_bytes) else self._described(copies)
            try:
                self._agent.postXferReq(request, b"")
            except self._errors:
                self._agent.releaseXferReq(request)
                raise
            return int(request)

    def wait(self, request: int, pause: threading.Event) -> bool:
        """Wait until the bytes are in the peer's memory (True), or until `pause` is set (False: they are still in
        flight)."""
        length_s = _FIRST_PAUSE_S
        with self._translated():
            while self._agent.getXferStatus(request) == self._nixl.NIXL_IN_PROG:
                # NIXL has no blocking wait; its own thread moves the bytes meanwhile.
                if pause.wait(length_s):
                    return False
                length_s = min(2 * length_s, _LONGEST_PAUSE_S)
            self._agent.releaseXferReq(request)
            return True

    def close(self, requests: Sequence[int] = ()) -> None:
        """End the agent: on return it reads and writes nothing any more. `requests` may still be in flight."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for request in requests:
                with suppress(*self._errors):
                    agent.releaseXferReq(request)
            if self._remote is not None:
                for handle in (handle for pair in self._lists.values() for handle in pair):
                    with suppress(*self._errors):
                        agent.releasedDlistH(handle)
                with suppress(*self._errors):
                    agent.invalidateRemoteMD(self._remote[0])
            with suppress(*self._errors):
                agent.deregisterMem(self._registered, [self._backend])
            del agent

    def _config(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _POLL_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = False
        return config

    def _indexed(self, copies: Sequence[RunPair], grain: int) -> Any:
        """Create a request by index into two lists, prepared on first use, that cover both memories."""
        name, memory = self._peer()
        lists = self._lists.get(grain)
        if lists is None:
            here = self._prepared(self._nixl.NIXL_INIT_AGENT, self._memory, grain)
            lists = self._lists[grain] = (here, self._prepared(name, memory, grain))
        sources = [np.arange(here // grain, (here + size) // grain, dtype=np.int32) for here, _, size in copies]
        targets = [np.arange(there // grain, (there + size) // grain, dtype=np.int32) for _, there, size in copies]
        sides = (lists[0], np.concatenate(sources), lists[1], np.concatenate(targets))
        return self._agent.makeXferReq(self._nixl.NIXL_WRITE, *sides, b"", [self._backend], False)

    def _prepared(self, name: str, memory: AgentMemory, grain: int) -> int:
        grains = np.array([[memory.base, grain, memory.gpu or 0, grain, memory.size_bytes // grain]], np.uint64)
        return int(self._agent.prepXferDlist(name, self._segment(memory), grains, [self._backend]))

    def _described(self, copies: Sequence[RunPair]) -> Any:
        name, there = self._peer()
        rows = np.array(copies, np.uint64)
        lists = []
        for memory, offsets in ((self._memory, rows[:, 0]), (there, rows[:, 1])):
            places = np.full((len(copies), 3), memory.gpu or 0, np.uint64)
            places[:, 0], places[:, 1] = offsets + np.uint64(memory.base), rows[:, 2]
            lists.append(self._nixl.nixlXferDList(self._segment(memory), places))
        return self._agent.createXferReq(self._nixl.NIXL_WRITE, *lists, name, b"", [self._backend])

    def _segment(self, memory: AgentMemory) -> Any:
        """NIXL's name for the kind of memory."""
        return self._nixl.DRAM_SEG if memory.gpu is None else self._nixl.VRAM_SEG

    def _peer(self) -> tuple[str, AgentMemory]:
        if self._remote is None:
            raise TransferError("NIXL has not loaded a peer's metadata yet")
        return self._remote

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from None


def _errors_of(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """All exceptions that NIXL's calls raise; they share no base. pybind11 raises RuntimeError for unknown ones."""
    return (*(getattr(nixl, name) for name in dir(nixl) if name.endswith("Error")), RuntimeError)


def _whole(copies: Sequence[RunPair], grain: int) -> bool:
    return all(not (here % grain or there % grain or size % grain) for here, there, size in copies)
