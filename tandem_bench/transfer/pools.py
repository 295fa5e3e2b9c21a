"""The two pools that every contestant uses: the same pages for all, so that none has luckier ones.

They are memfds, opened by the contestants' processes through this process's /proc entry, and mapped here as well: the
result is checked by a process that took no part in moving it.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tandem_bench.errors import CannotMeasure
from tandem_bench.transfer.cases import Copy

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_ODD = 0x9E3779B97F4A7C15
"""Factor of 2^64 over the golden ratio: its multiples by 1, 2, 3, … differ, and look like noise."""


class WrongBytes(CannotMeasure):
    """A contestant delivered other bytes than it was given."""


class Pools:
    """Both pools, filled; a context manager. Raises OSError when memory is insufficient."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fds = [_memfd(name, size_bytes) for name in ("bench-source", "bench-target")]
        self.source, self.target = (_mapped(fd, size_bytes) for fd in self._fds)
        words = self.source.view(np.uint64)
        words[:] = np.arange(1, words.size + 1, dtype=np.uint64)
        words *= np.uint64(_ODD)

    def paths(self) -> dict[str, str]:
        """Return the paths by which another process of this user opens them."""
        return {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in zip(("source", "target"), self._fds, strict=True)}

    def wipe(self) -> None:
        """Zero the target: no word of the source is zero."""
        self.target[:] = 0

    def check(self, who: str, copies: Sequence[Copy]) -> None:
        """Raise WrongBytes unless the target holds these copies and, since the last `wipe`, nothing else."""
        for source, target, length in copies:
            if not np.array_equal(self.source[source : source + length], self.target[target : target + length]):
                raise WrongBytes(f"{who}: the {length} bytes at {target} are not those at {source}")
        landed = 8 * np.count_nonzero(self.target.view(np.uint64))
        wanted = sum(length for _, _, length in copies)
        if landed != wanted:
            raise WrongBytes(f"{who}: {landed - wanted} bytes landed where nothing was to land")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for fd in self._fds:
            os.close(fd)


def _memfd(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    # Tandem's `shm` maps only memory that cannot shrink.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _mapped(fd: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)
