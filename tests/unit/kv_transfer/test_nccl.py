"""torch_dist between GPUs, as far as it can be walked without one.

What is real: who may take that way, the handshake, limits, aborts and environment, over a real gloo group. What is not:
NCCL itself and CUDA's streams.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from kv_transfer.pairing import Pairing
from kv_transfer.region import KVRegion
from kv_transfer.torch_pool import TorchPool
from kv_transfer.transports import nccl
from kv_transfer.transports.communicator import (
    RECEIVER,
    SENDER,
    CommunicatorBroken,
    Rendezvous,
    reach_store,
    serve_store,
)
from kv_transfer.transports.device_lane import entrance, goes_direct
from kv_transfer.transports.nccl import NcclCommunicator, over_nccl
from kv_transfer.transports.torch_dist_wire import Meeting
from tests.unit.kv_transfer.transport_peer import LAYOUT, PAIRING, make_region

CPU = torch.device("cpu")
LIMIT_S = 0.5
INT8 = Pairing.of(LAYOUT, replace(LAYOUT, dtype="int8"), wire_dtype="int8")


class Named(TorchPool):
    """A pool that claims to be on some device."""

    def __init__(self, identity: str) -> None:
        super().__init__(torch.zeros(4 * LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT)
        self._identity = identity

    @property
    def identity(self) -> str:
        return self._identity


def pool_on(identity: str) -> KVRegion:
    return KVRegion.on_device(Named(identity)) if identity else make_region(seed=0, num_blocks=4)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "problem", lambda: None)


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize(
    ("own", "theirs", "isolated", "pairing", "direct"),
    [
        ("cuda a", "cuda b", True, PAIRING, True),
        ("cuda a", "cuda b", False, PAIRING, False),  # NCCL neither encrypts nor authenticates
        ("cuda a", "cuda a", True, PAIRING, False),  # and joins no GPU to itself
        ("cuda a", "cuda b", True, INT8, False),
        ("cuda a", "cpu", True, PAIRING, False),
        ("cuda a", "", True, PAIRING, False),
        ("", "cuda b", True, PAIRING, False),
        ("cpu", "cpu", False, PAIRING, True),
    ],
)
def test_which_pools_are_joined_directly(own: str, theirs: str, isolated: bool, pairing: Pairing, direct: bool) -> None:
    meeting = Meeting(store_port=1, prefix="p", device=entrance(pool_on(theirs), isolated_network=isolated))
    assert goes_direct(pool_on(own), pairing, meeting, isolated_network=isolated) is direct


def test_a_torch_without_nccl_offers_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    assert nccl.problem()
    assert entrance(pool_on("cuda a"), isolated_network=True) == ""


@dataclass
class Fakes:
    """What stands in for CUDA, and what it has seen."""

    waiting: list[str | None] = field(default_factory=list)
    """TORCH_NCCL_BLOCKING_WAIT when each group was made."""
    blocking: list[int] = field(default_factory=list)
    aborted: int = 0
    synchronized: int = 0


class Work:
    """Like NCCL's it gets on by itself; gloo's does while somebody waits."""

    def __init__(self, work: distributed.Work) -> None:
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: distributed.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out in blocking wait")
        if self._error is not None:
            raise self._error


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    seen = Fakes()

    class Group:
        """As ProcessGroupNCCL is used, over gloo."""

        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(_timeout=None, config=SimpleNamespace(blocking=1))

        def __init__(self, store: distributed.Store, rank: int, _size: int, options: SimpleNamespace) -> None:
            seen.waiting.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
            seen.blocking.append(options.config.blocking)
            self._store, self._rank, self._timeout = store, rank, options._timeout
            self._gloo: distributed.ProcessGroupGloo | None = None

        def connected(self) -> distributed.ProcessGroupGloo:
            """Like NCCL's, it meets its peer at the first operation."""
            if self._gloo is None:
                options = distributed.ProcessGroupGloo._Options()
                options._timeout = self._timeout
                options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                self._gloo = distributed.ProcessGroupGloo(self._store, self._rank, 2, options)
            return self._gloo

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            return Work(self.connected().send(tensors, peer, tag))

        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            return Work(self.connected().recv(tensors, peer, tag))

        def abort(self) -> None:
            seen.aborted += 1

    def synchronize(_device: torch.device) -> None:
        seen.synchronized += 1

    cuda = SimpleNamespace(
        Stream=lambda _device: object(), stream=lambda _stream: nullcontext(), synchronize=synchronize
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    yield seen
    os.environ.pop("TORCH_NCCL_NONBLOCKING_TIMEOUT", None)


def rendezvous(store: distributed.Store, rank: int) -> Rendezvous:
    meeting = Meeting(store_port=store.port, prefix="p", device="cuda b")
    return Rendezvous(store=store, meeting=meeting, number=0, rank=rank, address="127.0.0.1", limit_s=LIMIT_S)


@pytest.fixture
def pair(fakes: Fakes) -> Iterator[tuple[NcclCommunicator, NcclCommunicator]]:
    store = serve_store("127.0.0.1", LIMIT_S)
    theirs = reach_store("127.0.0.1", store.port, LIMIT_S)
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(over_nccl, rendezvous(store, RECEIVER), CPU),
            threads.submit(over_nccl, rendezvous(theirs, SENDER), CPU),
        ]
        yield ends[0].result(10), ends[1].result(10)


def test_tensors_cross_in_order(pair: tuple[NcclCommunicator, NcclCommunicator], fakes: Fakes) -> None:
    receiver, sender = pair
    sent = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (1, 5, 70_000)]
    came = [torch.zeros_like(tensor) for tensor in sent]
    coming = [receiver.start(tensor) for tensor in came]
    for work in [sender.start(tensor) for tensor in sent]:
        sender.finish(work)
    for work in coming:
        receiver.finish(work)
    assert all(torch.equal(a, b) for a, b in zip(sent, came, strict=True))
    # No watchdog, which would end the process; and nobody else's groups are made like that.
    assert fakes.waiting == ["1", "1"]
    assert fakes.blocking == [0, 0]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    sender.close()
    receiver.close()


def test_what_misses_its_limit_is_broken_and_aborted(
    pair: tuple[NcclCommunicator, NcclCommunicator], fakes: Fakes
) -> None:
    receiver, sender = pair
    work = receiver.start(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(CommunicatorBroken):
        receiver.finish(work)
    receiver.close()
    assert (fakes.aborted, fakes.synchronized) == (1, 1)
    with pytest.raises(CommunicatorBroken):
        receiver.start(torch.zeros(8, dtype=torch.uint8))
    sender.close()
    assert fakes.aborted == 2


def test_a_peer_that_does_not_come_is_waited_for_no_longer_than_the_limit(fakes: Fakes) -> None:
    store = serve_store("127.0.0.1", LIMIT_S)
    with pytest.raises(CommunicatorBroken):
        over_nccl(rendezvous(store, RECEIVER), CPU)
    assert fakes.waiting == ["1"]
    assert fakes.aborted == 1
