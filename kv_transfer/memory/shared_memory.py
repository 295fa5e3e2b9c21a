"""Memory that other processes of this host can map: a sealed memfd.

A memfd has no name, so none is left behind, and its size is sealed, so that no access through a peer's mapping can
fail. All pages are allocated at the start: first-touch faults would halve the transfer rate. MAP_POPULATE would do
that, but up to Python 3.11 mmap holds the GIL meanwhile, more than half a second per GiB, during which the threads that
send this process's signs of life would be silent.
"""

import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPool:
    """Zeroed shared memory of `size_bytes`; `buffer` may back a tensor, `fd` may be passed to a peer.

    The mapping lives as long as any view of it; `close` only closes the descriptor.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            # Raises when there is no memory; a first touch would kill the process.
            os.posix_fallocate(self.fd, 0, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.buffer = map_shared(self.fd, size_bytes)
        except OSError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the descriptor; existing views stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def map_shared(fd: int, size_bytes: int) -> memoryview:
    """Map a memfd, with pages present. Raises OSError, or ValueError when it is smaller than `size_bytes` or could
    shrink."""
    if os.fstat(fd).st_size < size_bytes:
        raise ValueError("shared memory is smaller than its region")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("shared memory could shrink under its mapping")
    whole = memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED))
    # Reads one byte of each page, without the GIL.
    np.frombuffer(whole, dtype=np.uint8)[:: mmap.PAGESIZE].max()
    return whole
