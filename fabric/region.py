"""A worker's KV pool as its transports see it."""

from engine.assembly import EngineParts
from kv_transfer.region import KVRegion
from kv_transfer.torch_pool import TorchPool


def region_of(parts: EngineParts) -> KVRegion | None:
    """The pool, in host memory or on a GPU; None where its ranks hold it in as many processes."""
    memory = parts.kv_memory()
    if memory is not None:
        return KVRegion.of(memory, parts.layout, fd=None if parts.pool is None else parts.pool.fd)
    if parts.layout.tp_size > 1:
        return None
    return KVRegion.on_device(TorchPool(parts.runner.kv_cache.blocks, parts.layout))
