"""What this machine has: who shares it, and whether it reaches others by RDMA."""

import os
from pathlib import Path


def host_id() -> str:
    """Equal for processes that reach each other's abstract Unix sockets as one user: boot, network namespace, uid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    return devices.is_dir() and any(devices.iterdir())
