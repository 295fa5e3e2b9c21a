"""A KV pool that is not in host memory, as far as moving its blocks needs to know.

Payload leaves and enters through pinned host memory, or stays on the device and goes to a peer's pool there. What the
pool is made of is `kv_transfer.memory.torch_pool`'s business; nothing here imports torch.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import RunPairs, Runs
from tandem.values.kv_layout import KVLayout

Bytes = npt.NDArray[np.uint8]


class DevicePool(Protocol):
    """One worker's blocks. Every call returns when its work is done; any thread may call, and several at once.

    Calls do not wait for the engine's work on the device: what is read must be there when the call is made, and what is
    written must be unused (kv_transfer.torch_pool says why both hold). Meanwhile the caller holds no lock
    that the event loop takes.

    What works on the device raises TransferError when sizes disagree, or when there is no memory left for the work.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def identity(self) -> str:
        """Kind of device and which one it is, wherever it is seen from: "cuda GPU-...", or "cpu"."""

    def allocate(self, num_bytes: int) -> Bytes:
        """Host memory that the device copies from and to at full rate."""

    def gather(self, runs: Runs, payload: Bytes) -> None:
        """Copy what `runs` name of the pool into host memory, in their order."""

    def scatter(self, runs: Runs, payload: Bytes) -> None:
        """Copy host memory into what `runs` name of the pool."""

    def copy(self, copies: RunPairs) -> None:
        """Copy within the pool."""

    @property
    def memory(self) -> Any:
        """The whole pool as a tensor, to be shared with another process."""

    def send(self, reads: Runs, target: Any, writes: Runs) -> int:
        """Copy into another pool that this process has opened, device to device; `sum32` of what went."""

    def blank(self, num_bytes: int) -> Any:
        """A tensor on the device, beside the pool, without waiting for anything."""

    def pack_summed(self, runs: Runs) -> tuple[Any, int]:
        """A copy on the device of what `runs` name, in their order, and its `sum32`."""

    def unpack_summed(self, runs: Runs, packed: Any) -> int:
        """Copy a tensor on the device into what `runs` name; its `sum32`."""

    def checksum(self, runs: Runs) -> int:
        """`sum32` (see torch_pool) of what `runs` name, in their order, computed on the device."""
