"""A ParallelGroup over torch.distributed: gloo between CPU processes, NCCL between GPUs.

The process group is made directly, not through `init_process_group`, so that nothing in the process is global. On one
machine its store is a file that only the ranks have open (see engine.distributed.ranks.leader), and gloo
listens on the loopback device. Over several (see engine.distributed.links.node_group) both listen at the address at
which the ranks' nodes reach each other.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.link_store import Keys, LinkStore
from engine.distributed.links.lost import RankLost

_LOOPBACK = "127.0.0.1"
_GLOO_THREADS = 1
_SMALL_BYTES = 64 * 1024
"""Size up to which gloo sends every part to every rank faster than around a ring; measured with two and four ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverNodes:
    """Means by which a rank meets the ranks of other nodes."""

    keys: Keys
    host: str
    """Address at which other nodes reach this one."""


class _Work(Protocol):
    def wait(self) -> object: ...


class _Collectives(Protocol):
    """The methods of a process group used here; torch's own stubs lack them."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object) -> _Work: ...

    def abort(self) -> None: ...


class TorchGroup:
    """ParallelGroup over torch.distributed: gloo between CPU ranks, NCCL between GPUs."""

    def __init__(
        self,
        store_fd: int | None,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        fixed_order: bool = False,
        over_nodes: OverNodes | None = None,
    ) -> None:
        """Meet the other ranks; returns once all have joined.

        `store_fd`: descriptor of an empty file that every rank has open; `close` closes it, the caller does when this
        raises. None: the ranks are on several nodes and meet by `over_nodes`. `timeout_s` bounds the wait for
        the others, now and in every later call. `fixed_order`: sums do not depend on a tensor's size. Raises RankLost.
        """
        is_cuda = device.type == "cuda"
        self.rank = rank
        self.size = size
        # The sum of two ranks has only one order.
        self._most_bytes_in_order = sys.maxsize if fixed_order and size > 2 else 0 if is_cuda else _SMALL_BYTES
        self._device = device
        self._store_fd = store_fd
        self._backend: _Backend | None = None
        backend = _Backend(store_fd, over_nodes)
        if (failure := backend.open(rank, size, timedelta(seconds=timeout_s), is_cuda=is_cuda)) is not None:
            raise RankLost(f"rank {rank} did not join the group: {failure}")
        self._backend = backend
        try:
            # NCCL connects at its first call: not during a request.
            self.barrier()
        except RankLost:
            self._leave()
            raise

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        whole = tensor.contiguous()
        if whole.nbytes <= self._most_bytes_in_order:
            self._sum_in_rank_order_(whole)
        else:
            self._run(lambda backend: backend.group.allreduce([whole]))
        return tensor if whole is tensor else tensor.copy_(whole)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        whole = tensor.contiguous()
        parts = [torch.empty_like(whole) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run(lambda backend: backend.group.gather([parts] if parts else [], [whole], options))
        return parts

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1, device=self._device))

    def close(self) -> None:
        """Leave the group and free its resources; the other ranks are gone, or about to be. May be called twice."""
        if self._backend is not None:
            self._leave()
            if self._store_fd is not None:
                os.close(self._store_fd)

    def _leave(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.group.abort()

    def _sum_in_rank_order_(self, tensor: Tensor) -> None:
        """Gather all parts on every rank and add them in the order of ranks.

        A ring moves less, but takes twice as many turns, which dominate the time of a small tensor; and it starts each
        section of a tensor at another rank, so that among three or more the order of the additions, and with it the
        last bit, depends on an element's position in the tensor.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda backend: backend.group.allgather([parts], [tensor]))
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)

    def _run(self, start: "Callable[[_Backend], _Work]") -> None:
        backend = self._backend  # another thread may close the group meanwhile
        if backend is None:
            raise RankLost("the group is closed")
        try:
            start(backend).wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} lost the other ranks: {error!s:.160}") from None


class _Backend:
    """A process group with its store, and the store's file.

    The store opens its file by name until its very end: were the file closed by then, the process would end, and were
    its number reused by another file, the store would write to that. Waiting threads and exceptions in flight hold a
    group longer than its owner does, so the last holder closes the file; no holder keeps the group alive by itself.
    """

    def __init__(self, store_fd: int | None, over_nodes: OverNodes | None) -> None:
        self._fd = None if store_fd is None else os.dup(store_fd)
        self._over_nodes = over_nodes
        self._store: Any = None
        self.group: Any = None

    def open(self, rank: int, size: int, timeout: timedelta, *, is_cuda: bool) -> str | None:
        """Make the group. Returns an error message, or None."""
        try:
            self._store = self._open_store(size, timeout)
            self.group = (_nccl if is_cuda else _gloo)(self, rank, size, timeout)
        except RuntimeError as error:
            return str(error)
        return None

    @property
    def store(self) -> Any:
        """The store that the group is created with."""
        return self._store

    @property
    def host(self) -> str:
        """Address of this node for the group's own connections."""
        return _LOOPBACK if self._over_nodes is None else self._over_nodes.host

    def _open_store(self, size: int, timeout: timedelta) -> Any:
        if self._over_nodes is not None:
            return LinkStore(self._over_nodes.keys, timeout_s=timeout.total_seconds())
        store: Any = dist.FileStore(f"/proc/self/fd/{self._fd}", size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store

    def __del__(self) -> None:
        self.group = None
        self._store = None
        if self._fd is not None:
            os.close(self._fd)


def _gloo(backend: _Backend, rank: int, size: int, timeout: timedelta) -> _Collectives:
    group: Any = dist.ProcessGroupGloo
    options = group._Options()  # the only way to name a device, without which gloo asks the resolver for one
    options._devices = [group.create_device(hostname=backend.host)]
    options._threads = _GLOO_THREADS
    options._timeout = timeout
    made: _Collectives = group(backend.store, rank, size, options)
    return made


def _nccl(backend: _Backend, rank: int, size: int, timeout: timedelta) -> _Collectives:
    if backend.host != _LOOPBACK and "NCCL_SOCKET_IFNAME" not in os.environ:
        # NCCL is configured by interface, not by address; by default it uses the first that it finds.
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(backend.host)}"
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = timeout
    made: _Collectives = group(backend.store, rank, size, options)
    return made


_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str:
    """Name of the interface with this IP address. Raises RankLost when none has it."""
    wanted = ipaddress.ip_address(address)
    for name, found in (_ipv4_addresses() if wanted.version == 4 else _ipv6_addresses()).items():
        if wanted in found:
            return name
    raise RankLost(f"no network interface here has the address {address}")


def _ipv4_addresses() -> dict[str, set[ipaddress.IPv4Address]]:
    found: dict[str, set[ipaddress.IPv4Address]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            found.setdefault(name, set()).add(ipaddress.IPv4Address(answer[20:24]))
    return found


def _ipv6_addresses() -> dict[str, set[ipaddress.IPv6Address]]:
    found: dict[str, set[ipaddress.IPv6Address]] = {}
    for line in _INET6.read_text(encoding="ascii").splitlines() if _INET6.exists() else ():
        digits, *_rest, name = line.split()
        found.setdefault(name, set()).add(ipaddress.IPv6Address(int(digits, 16)))
    return found
