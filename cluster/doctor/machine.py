"""Checks of the machine itself for `tandem doctor`: cores, memory, disk, shared memory, limits."""

import os
import platform
import resource
import shutil
import tempfile
from pathlib import Path

from cluster.doctor.findings import Finding, Status
from cluster.terminal_text import format_bytes
from tandem.config.cluster import ClusterConfig
from tandem.process.host_memory import free_memory_bytes, memory_capacity_bytes

MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
MIN_SHM_BYTES = 64 << 20
MIN_OPEN_FILES = 4096
SHM = "/dev/shm"  # noqa: S108  # only measured, never written to
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve")


def cores(_config: ClusterConfig) -> list[Finding]:
    """Report the usable cores and the instruction sets that matter for matrix multiplication."""
    usable = len(os.sched_getaffinity(0))
    found = [flag for flag in _CPU_FLAGS if flag in _cpu_flags()]
    detail = (
        f"{usable} usable of {os.cpu_count()}, {platform.machine()}, {' '.join(found) or 'vector instructions unknown'}"
    )
    status, hint = (Status.OK, "") if usable > 1 else (Status.WARN, "all workers will share one core")
    return [Finding(name="cores", status=status, detail=detail, hint=hint)]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())


def memory(_config: ClusterConfig) -> list[Finding]:
    """Report free memory, and the container's limit if there is one."""
    import psutil

    machine = psutil.virtual_memory()
    limit, free = memory_capacity_bytes(), free_memory_bytes()
    detail = f"{format_bytes(free)} free of {format_bytes(machine.total)}"
    if limit < machine.total:
        detail += f", container limit {format_bytes(limit)}"
    if free < MIN_MEMORY_BYTES:
        hint = f"three workers need about {format_bytes(MIN_MEMORY_BYTES)}; reduce engine.memory_bytes"
        return [Finding(name="memory", status=Status.WARN, detail=detail, hint=hint)]
    return [Finding(name="memory", status=Status.OK, detail=detail)]


def disk(_config: ClusterConfig) -> list[Finding]:
    """Report free disk space here and in the directory for temporary files."""
    found = []
    for name, path in (("disk here", Path.cwd()), ("disk for temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(path).free
        status, hint = (Status.OK, "") if free >= MIN_DISK_BYTES else (Status.WARN, "models and logs need disk space")
        found.append(Finding(name=name, status=status, detail=f"{format_bytes(free)} free in {path}", hint=hint))
    return found


def shared_memory(_config: ClusterConfig) -> list[Finding]:
    """Check memfd, which carries KV between processes of one host, and /dev/shm, which PyTorch and NCCL use."""
    try:
        os.close(os.memfd_create("tandem-doctor", os.MFD_CLOEXEC))
        found = [Finding(name="memfd", status=Status.OK, detail="works: KV can use shared memory")]
    except (AttributeError, OSError) as error:
        hint = "start with `--transport tcp`; memfd needs Linux 3.17 and a seccomp profile that allows it"
        found = [Finding(name="memfd", status=Status.WARN, detail=f"does not work: {error}", hint=hint)]
    try:
        usage = shutil.disk_usage(SHM)
    except OSError as error:
        return [
            *found,
            Finding(name=SHM, status=Status.WARN, detail=str(error.strerror), hint="mount a tmpfs there"),
        ]
    detail = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < MIN_SHM_BYTES:
        hint = "in Docker: --shm-size=1g; in Kubernetes: an emptyDir with medium Memory"
        return [*found, Finding(name=SHM, status=Status.WARN, detail=detail, hint=hint)]
    return [*found, Finding(name=SHM, status=Status.OK, detail=detail)]


def limits(_config: ClusterConfig) -> list[Finding]:
    """Report the limits of open files (one per client connection) and of locked memory (for RDMA)."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    status, hint = Status.OK, ""
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        status, hint = Status.WARN, f"`ulimit -n {MIN_OPEN_FILES}`, or more for many clients"
    detail = f"{_limit(files)}, at most {_limit(most)}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked_text = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    locked_hint = "" if locked == resource.RLIM_INFINITY else "only RDMA needs more (`ulimit -l unlimited`)"
    return [
        Finding(name="open files", status=status, detail=detail, hint=hint),
        Finding(name="locked memory", status=Status.INFO, detail=locked_text, hint=locked_hint),
    ]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
