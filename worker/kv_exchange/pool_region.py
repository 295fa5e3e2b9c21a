"""A worker's engine with a KV pool that transports can use, and the region of it that is in a process."""

import socket
from functools import partial

import torch

from engine.assembly import EngineParts, assemble
from engine.distributed.ranks.command_line import exit_process
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.loader import Progress
from engine.runner.device_queue import device_queue
from engine.spec import EngineSpec
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.regions.server import OwnNode, RegionServer
from tandem.rpc.mutual_tls import TlsFiles
from worker.node_group import RANK_MODULE


def assemble_worker(spec: EngineSpec, progress: Progress | None) -> EngineParts:
    """Assemble the engine; each rank's KV is a region of its own where they cannot share one. Raises as `assemble`."""
    if _is_in_regions(spec):
        return assemble(spec, region_module=RANK_MODULE, progress=progress)
    return assemble(spec, pool=SharedPool, progress=progress)


def _is_in_regions(spec: EngineSpec) -> bool:
    if spec.tensor_parallel_size == 1:
        return False
    return spec.kv_memory == "private" or (spec.device != "cpu" and torch.cuda.is_available())


def region_of(parts: EngineParts) -> KVRegion:
    """The pool or, where each rank has its own part for itself, rank 0's; in host memory or on a GPU."""
    memory = parts.own_region()
    if memory is not None:
        return KVRegion.from_buffer(memory, parts.layout, fd=None if parts.pool is None else parts.pool.fd)
    return _on_device(parts.runner.kv_cache)


def region_of_cache(cache: PagedKVCache) -> KVRegion:
    """The part of one rank, in its own process."""
    memory = cache.host_view()
    return _on_device(cache) if memory is None else KVRegion.from_buffer(memory, cache.layout)


def serve_region(
    sock: socket.socket, cache: PagedKVCache, *, host: str | None = None, tls: TlsFiles | None = None
) -> None:
    """Serve a rank's part of the pool to rank 0 at the other end of `sock`, on threads beside the rank's own.

    `host`, `tls`: see engine.distributed.ranks.follower.ServeRegion.
    """
    node = None if host is None else OwnNode(host=host, tls=tls)
    RegionServer(region_of_cache(cache), sock, end_process=partial(exit_process, 1), node=node).start()


def _on_device(cache: PagedKVCache) -> KVRegion:
    # Transports do not wait for the engine's stream, on which the pool was cleared.
    device_queue(cache.blocks.device).mark().wait()
    return KVRegion.on_device(TorchPool(cache.blocks, cache.layout))
