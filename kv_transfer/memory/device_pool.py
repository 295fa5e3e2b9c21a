"""Interface to a KV pool outside host memory, for moving its blocks.

Payload leaves and enters through pinned host memory, or stays on the device and goes to a peer's pool there. The
implementation is `kv_transfer.memory.torch_pool`; nothing here imports torch.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import RunPairs, Runs
from tandem.values.kv_layout import KVLayout

Bytes = npt.NDArray[np.uint8]


class SendUnderWay(Protocol):
    """One copy from pool to pool that may still run on the device."""

    def done(self) -> bool:
        """Whether `result` will not wait."""

    def result(self) -> int:
        """Wait for its end, once; returns the `sum32` of the bytes."""


class SendLane(Protocol):
    """Copies into another pool, several of which may be under way; used by one thread."""

    def start(self, reads: Runs, writes: Runs) -> SendUnderWay:
        """Start a copy. Results are asked for in the order of the starts, each soon, since a lane that is in use keeps
        others from the device. Raises TransferError as DevicePool does."""


class DevicePool(Protocol):
    """One worker's blocks on a device. Every call returns when its work is done; calls may be concurrent, on any
    thread.

    Calls do not wait for the engine's work on the device: blocks to be read must be complete, and blocks to be written
    unused (kv_transfer.memory.torch_pool explains why both hold). The caller holds no lock that the event loop takes.

    Calls that work on the device raise TransferError when sizes disagree or the device has no memory left.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def identity(self) -> str:
        """Kind and identity of the device, equal in all processes: "cuda GPU-...", or "cpu"."""

    @property
    def address(self) -> int:
        """Address of the pool's first byte in this process, on the device or, for "cpu", in host memory."""

    @property
    def cuda_index(self) -> int | None:
        """Number of the GPU as this process counts them; None for "cpu"."""

    def allocate(self, num_bytes: int) -> Bytes:
        """Host memory that the device copies from and to at full rate."""

    def gather(self, runs: Runs, payload: Bytes) -> None:
        """Copy the bytes that `runs` name in the pool into host memory, in their order."""

    def scatter(self, runs: Runs, payload: Bytes) -> None:
        """Copy host memory into the bytes that `runs` name in the pool."""

    def copy(self, copies: RunPairs) -> None:
        """Copy within the pool."""

    @property
    def memory(self) -> Any:
        """The whole pool as a tensor, to be shared with another process."""

    def send(self, reads: Runs, target: Any, writes: Runs) -> int:
        """Copy into another pool that this process has opened, device to device; returns the `sum32` of the bytes."""

    def lane_to(self, target: Any) -> SendLane:
        """A way to `send` to that pool without waiting for each chunk."""

    def blank(self, num_bytes: int) -> Any:
        """A tensor on the device, outside the pool, allocated without waiting for anything."""

    def pack_summed(self, runs: Runs) -> tuple[Any, int]:
        """A copy on the device of the bytes that `runs` name, in their order, and its `sum32`."""

    def unpack_summed(self, runs: Runs, packed: Any) -> int:
        """Copy a tensor on the device into the bytes that `runs` name; returns its `sum32`."""

    def checksum(self, runs: Runs) -> int:
        """`sum32` (see torch_pool) of the bytes that `runs` name, in their order, computed on the device."""
