"""A worker's KV pool as its transports see it."""

from engine.assembly import EngineParts
from engine.runner.device_queue import device_queue
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool


def region_of(parts: EngineParts) -> KVRegion | None:
    """The pool, in host memory or on a GPU; None where its ranks hold it in as many processes."""
    memory = parts.kv_memory()
    if memory is not None:
        return KVRegion.from_buffer(memory, parts.layout, fd=None if parts.pool is None else parts.pool.fd)
    if parts.layout.tp_size > 1:
        return None
    blocks = parts.runner.kv_cache.blocks
    # Transports do not wait for the engine's stream, on which the pool was cleared.
    device_queue(blocks.device).mark().wait()
    return KVRegion.on_device(TorchPool(blocks, parts.layout))
