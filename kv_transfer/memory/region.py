"""A worker's KV pool as bytes, or the part of it that is in one process (see kv_transfer/layout/lanes.py)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import Runs
from kv_transfer.memory.device_pool import DevicePool
from tandem.errors import InvariantError
from tandem.values.kv_layout import KVLayout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVRegion:
    """Contiguous bytes `[plane, block, layer_block_bytes]`: the layers of all its ranks, one rank after another."""

    buffer: memoryview
    num_blocks: int
    layout: KVLayout
    fd: int | None = None
    """Descriptor of the memory when other processes can map it (see memory/shared_memory.py)."""
    address: int = 0
    """Address of the first byte in this process; 0 when the pool is not in host memory."""
    device: DevicePool | None = None
    """The device pool when the blocks are not in host memory; then `buffer` is empty."""

    @classmethod
    def from_buffer(cls, buffer: memoryview, layout: KVLayout, *, fd: int | None = None) -> "KVRegion":
        """Interpret `buffer` (writable, contiguous) under `layout`. Raises ValueError when the sizes disagree."""
        flat = buffer.cast("B")
        num_blocks, rest = divmod(flat.nbytes, layout.region_block_bytes)
        if flat.readonly or rest or not num_blocks:
            raise ValueError(f"{flat.nbytes} bytes are not a writable pool of {layout.region_block_bytes}-byte blocks")
        address = int(np.frombuffer(flat, dtype=np.uint8).ctypes.data)
        return cls(buffer=flat, num_blocks=num_blocks, layout=layout, address=address, fd=fd)

    @classmethod
    def on_device(cls, device: DevicePool) -> "KVRegion":
        """The region of a pool on a device."""
        return cls(buffer=memoryview(b""), num_blocks=device.num_blocks, layout=device.layout, device=device)

    def views(self, runs: Runs) -> list[memoryview]:
        """Views of these bytes.

        Raises InvariantError for a pool that is not in host memory.
        """
        buffer = self._host_bytes()
        views: list[memoryview] = []
        slices = [[slice(offset, offset + length) for offset, length in one] for one in runs.plane_runs]
        for plane, index in runs.planes:
            plane_bytes = buffer[plane * runs.plane_bytes : (plane + 1) * runs.plane_bytes]
            views += [plane_bytes[run] for run in slices[index]]
        return views

    def array(self) -> Bytes:
        """The whole region as a view. Raises InvariantError for a pool that is not in host memory."""
        return np.frombuffer(self._host_bytes(), dtype=np.uint8)

    def _host_bytes(self) -> memoryview:
        if self.device is not None:
            raise InvariantError("this KV pool is not in host memory")
        return self.buffer
