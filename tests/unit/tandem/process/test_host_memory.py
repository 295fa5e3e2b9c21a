"""Available memory: page cache counts as free, and a container's limit precedes the machine's."""

import os
from pathlib import Path

import pytest

from tandem.process.host_memory import free_memory_bytes, memory_capacity_bytes

MEMINFO = "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:    4000 kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}")


def group_v2(folder: Path, limit: object, usage: int, inactive: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 9\n")


def test_free_memory_includes_page_cache(root: Path) -> None:
    assert free_memory_bytes(root) == 4000 * 1024


def test_free_memory_uses_tightest_cgroup(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/worker\n")
    groups = root / "sys/fs/cgroup"
    group_v2(groups / "pods/worker", "max", 70_000)
    assert free_memory_bytes(root) == 4000 * 1024, "no limit is none"
    group_v2(groups / "pods", 900_000, 200_000, inactive=50_000)
    assert free_memory_bytes(root) == 750_000
    group_v2(groups / "pods/worker", 500_000, 499_000)
    assert free_memory_bytes(root) == 1_000
    group_v2(groups / "pods/worker", 500_000, 510_000)
    assert free_memory_bytes(root) == 0
    group_v2(groups / "pods/worker", 1 << 40, 0)
    assert free_memory_bytes(root) == 750_000


def test_memory_capacity_is_machine_or_smallest_cgroup_limit(root: Path) -> None:
    """Whatever part of it is in use."""
    assert memory_capacity_bytes(root) == 9000 * 1024
    write(root / "proc/self/cgroup", "0::/pods/worker\n")
    groups = root / "sys/fs/cgroup"
    group_v2(groups / "pods/worker", "max", 70_000)
    assert memory_capacity_bytes(root) == 9000 * 1024
    group_v2(groups / "pods", 900_000, 899_000)
    assert memory_capacity_bytes(root) == 900_000
    group_v2(groups / "pods/worker", 1 << 40, 0)
    assert memory_capacity_bytes(root) == 900_000


def test_free_memory_container_uses_mounted_cgroup(root: Path) -> None:
    """The path in /proc/self/cgroup is the host's and does not exist in the container."""
    write(root / "proc/self/cgroup", "4:memory,hugetlb:/docker/1234\n3:cpuset:/docker/1234\n0::/docker/1234\n")
    own = root / "sys/fs/cgroup/memory"
    write(own / "memory.limit_in_bytes", 800_000)
    write(own / "memory.usage_in_bytes", 300_000)
    write(own / "memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n")
    assert free_memory_bytes(root) == 501_000
    assert memory_capacity_bytes(root) == 800_000


def test_free_memory_is_within_machine_total() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory_bytes() <= total
    assert free_memory_bytes() <= memory_capacity_bytes() <= total
