"""Memory mapped by peers: complete from the start, and created without blocking other threads."""

import mmap

import pytest

from kv_transfer.memory.shared_memory import SharedPool, map_shared

SIZE = 4 << 20


def resident_bytes() -> list[int]:
    """Of each mapping of a pool in this process."""
    found: list[int] = []
    is_pool = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first:
                is_pool = "memfd:tandem-kv" in line
            elif is_pool and first == "Rss:":
                found.append(int(rest[0]) << 10)
    return found


def test_shared_memory_prefault_releases_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []

    class Watched(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            flags.append(kwargs["flags"])
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr("kv_transfer.memory.shared_memory.mmap.mmap", Watched)
    before = resident_bytes()
    with SharedPool(SIZE) as pool:
        peers = map_shared(pool.fd, SIZE)
        assert sorted([*before, SIZE, SIZE]) == sorted(resident_bytes())
        assert flags == [mmap.MAP_SHARED, mmap.MAP_SHARED]
        pool.buffer[-1] = 7
        assert (peers[0], peers[-1]) == (0, 7)
