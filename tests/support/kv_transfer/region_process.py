"""A rank's process with a region and nothing else, to be killed and stopped.

    python -m tests.support.kv_transfer.region_process SOCKET_FD POOL_FD RANKS REGION NUM_BLOCKS HEADS

The pool is a memfd, so that tests can look at it, but transports are not told of it: no other process can map it.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import map_shared
from kv_transfer.regions.interface import ReceivingRegion, SendingRegion
from kv_transfer.regions.remote import RemoteRegion, open_region
from kv_transfer.regions.server import RegionServer, open_ends
from kv_transfer.regions.wire import RegionEnds
from tests.support.kv_transfer.ranked_pool import RankedPool, ranked_layout

TCP = RegionEnds(transport="tcp", host="127.0.0.1")


class RegionProcess:
    """The process of one region of a RankedPool, and rank 0's view of it."""

    def __init__(self, process: subprocess.Popen[bytes], region: RemoteRegion) -> None:
        self.process = process
        self.region = region

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        """Freeze it."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def region_process(pool: RankedPool, index: int, ends: RegionEnds = TCP) -> AsyncIterator[RegionProcess]:
    near, far = socket.socketpair()
    memory, layout = pool.memories[index], pool.layout
    args = [far.fileno(), memory.fd, layout.tp_size, index, pool.num_blocks, layout.num_kv_heads]
    process = subprocess.Popen(  # noqa: ASYNC220 - starts a child, and waits for nothing
        [sys.executable, "-m", __name__, *map(str, args)], pass_fds=(far.fileno(), memory.fd), stdin=subprocess.DEVNULL
    )
    far.close()
    try:
        region = await open_region(near, ends, f"rank {index}", asyncio.ensure_future)
        try:
            yield RegionProcess(process, region)
        finally:
            process.send_signal(signal.SIGCONT)
            await region.aclose()
    finally:
        process.send_signal(signal.SIGCONT)
        try:
            await asyncio.to_thread(process.wait, 10)
        finally:
            process.kill()
            process.wait()


async def open_regions(
    stack: AsyncExitStack, pool: RankedPool, ends: RegionEnds = TCP
) -> tuple[list[SendingRegion], list[ReceivingRegion], list[RegionProcess]]:
    """Rank 0's region in this process, and a process for each other."""
    first = open_ends(pool.regions[0], ends)
    sending: list[SendingRegion] = [first.sending]
    receiving: list[ReceivingRegion] = [first.receiving]
    others = [await stack.enter_async_context(region_process(pool, i, ends)) for i in range(1, len(pool.regions))]
    for other in others:
        sending.append(other.region)
        receiving.append(other.region)
    return sending, receiving, others


def main() -> None:
    """Serve a region until rank 0 ends."""
    socket_fd, pool_fd, ranks, _region, num_blocks, heads = map(int, sys.argv[1:])
    layout = ranked_layout(ranks, heads=heads)
    memory = map_shared(pool_fd, num_blocks * layout.region_block_bytes)
    region = KVRegion.from_buffer(memory, layout)
    RegionServer(region, socket.socket(fileno=socket_fd), end_process=partial(os._exit, 1)).run()


if __name__ == "__main__":
    main()
