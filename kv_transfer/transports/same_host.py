"""Properties of this machine: an identifier shared by its processes, and whether it has RDMA."""

import os
from pathlib import Path


def host_id() -> str:
    """Identifier of boot, network namespace and uid; processes that share it reach each other's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    return devices.is_dir() and any(devices.iterdir())
