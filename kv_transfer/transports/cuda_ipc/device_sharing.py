"""Makes the memory of a GPU reachable from another process of the same host. Imports torch lazily.

torch's storages can be exported (cudaIpcGetMemHandle plus what its allocator needs) as a tuple of numbers and byte
strings, which is passed on as JSON.
"""

import importlib
import json
from typing import Any, Protocol

from kv_transfer.memory.region import KVRegion
from tandem.errors import TransferError


class DeviceSharing(Protocol):
    """Lends this process's pool to others, and opens theirs."""

    def problem(self, region: KVRegion) -> str | None:
        """Reason why this pool can neither be lent nor copied from into a lent one; None when it can."""

    def lend(self, memory: Any) -> bytes:
        """Export a uint8 tensor for one use by one other process; the tensor must outlive the loan. Raises
        TransferError."""

    def borrow(self, token: bytes) -> Any:
        """Open another process's tensor for writing. Raises TransferError."""


class CudaSharing:
    """DeviceSharing of CUDA memory, between processes that see the same devices."""

    def problem(self, region: KVRegion) -> str | None:
        if region.device is None:
            return "needs a KV pool in GPU memory"
        torch = importlib.import_module("torch")
        return None if torch.cuda.is_available() else "needs a GPU"

    def lend(self, memory: Any) -> bytes:
        try:
            parts = memory.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            # Memory that CUDA's allocator made of expandable segments cannot be lent.
            raise TransferError(f"this GPU memory cannot be lent: {error}") from None
        uuid = str(importlib.import_module("torch").cuda.get_device_properties(memory.device).uuid)
        fields = [part.hex() if isinstance(part, bytes) else part for part in parts]
        shape = {"offset": memory.storage_offset(), "size": memory.numel(), "uuid": uuid}
        return json.dumps({"storage": fields, **shape}).encode()

    def borrow(self, token: bytes) -> Any:
        torch = importlib.import_module("torch")
        try:
            data = json.loads(token)
            storage, offset, size = data["storage"], int(data["offset"]), int(data["size"])
            # Processes may number the same devices differently.
            device = _device_of(torch, str(data["uuid"]))
            parts = [device, *(bytes.fromhex(part) if isinstance(part, str) else part for part in storage[1:])]
            lent = torch.UntypedStorage._new_shared_cuda(*parts)
            return torch.empty(0, dtype=torch.uint8, device=lent.device).set_(lent, offset, (size,))
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise TransferError(f"the peer's GPU memory cannot be opened: {type(error).__name__}: {error}") from None


def _device_of(torch: Any, uuid: str) -> int:
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == uuid:
            return device
    raise ValueError("this process does not see the peer's GPU")
