"""Measures the host memory that this process may still take, and that it takes."""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Free memory of one machine, once the ranks there have loaded their weights."""

    free_bytes: int
    where: str = ""
    """Address of the machine, for errors; empty: this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """File names of one version of control groups."""

    mount: str
    limit: str
    usage: str
    droppable: str
    """Field of memory.stat: pages of files that were not used lately."""


_V1 = _Hierarchy(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    droppable="total_inactive_file",
)
_V2 = _Hierarchy(mount="sys/fs/cgroup", limit="memory.max", usage="memory.current", droppable="inactive_file")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes left: the least of the machine's available memory and the rest of every enclosing control group's limit.

    Pages of files count as left, since they can be read again: `MemAvailable` of proc(5), and a group's inactive file
    pages (Linux: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). `root`: where proc and sys are.
    """
    return min([_left_on_machine(root), *_left_in_groups(root)])


def memory_capacity_bytes(root: Path = Path("/")) -> int:
    """Bytes in all: the least of the machine's memory and of every enclosing control group's limit, used or not."""
    total_kb = _field(root / "proc/meminfo", "MemTotal:")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if total_kb is None else total_kb * 1024
    limits = (_limit_of_group(folder, hierarchy) for folder, hierarchy in _groups(root))
    return min([total, *(limit for limit in limits if limit is not None)])


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is not paged out, shared pages included; 0 where proc does not say."""
    fields = (_text(root / "proc/self/statm") or "").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _left_on_machine(root: Path) -> int:
    kilobytes = _field(root / "proc/meminfo", "MemAvailable:")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kilobytes is None else kilobytes * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    for folder, hierarchy in _groups(root):
        left = _left_in_group(folder, hierarchy)
        if left is not None:
            yield left


def _groups(root: Path) -> Iterator[tuple[Path, _Hierarchy]]:
    """Folders of the groups around this process, the innermost first."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _V1 if controllers else _V2
        mount = root / hierarchy.mount
        group = mount / path.lstrip("/")
        # In a container the path may be the host's: missing folders are skipped, the mount is the container's group.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
            yield folder, hierarchy


def _limit_of_group(folder: Path, hierarchy: _Hierarchy) -> int | None:
    """Bytes that a control group may use; None where it has no limit."""
    limit = (_text(folder / hierarchy.limit) or "").strip()
    return int(limit) if limit.isdecimal() else None


def _left_in_group(folder: Path, hierarchy: _Hierarchy) -> int | None:
    """Bytes that a control group may still use; None where it has no limit."""
    limit, usage = _limit_of_group(folder, hierarchy), _text(folder / hierarchy.usage)
    if limit is None or usage is None:
        return None
    droppable = _field(folder / "memory.stat", hierarchy.droppable) or 0
    return max(0, limit - int(usage) + droppable)


def _field(path: Path, name: str) -> int | None:
    found = re.search(rf"^{re.escape(name)}\s+(\d+)", _text(path) or "", re.MULTILINE)
    return None if found is None else int(found[1])


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None


def return_freed_memory() -> None:
    """Give freed heap pages back to the system. Does nothing with another C library than glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
