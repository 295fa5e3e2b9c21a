"""The transports: their order of preference, the requirements of each, and how a worker opens its ends.

Unless one is forced, two workers use the first that both can: memory within a process; cuda_ipc or shm on one host;
nixl where both have RDMA and an isolated network and the receiver's pool is in host memory; otherwise tcp. torch_dist
is only used when forced: over gloo it is slower than tcp and authenticates nobody.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.transports.cuda_ipc.device_sharing import CudaSharing, DeviceSharing
from kv_transfer.transports.cuda_ipc.receiver import NAME as CUDA_IPC
from kv_transfer.transports.cuda_ipc.receiver import CudaIpcReceiver
from kv_transfer.transports.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transports.in_process import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.transports.interface import KVReceiver, KVSender
from kv_transfer.transports.nixl import agent as nixl_agent
from kv_transfer.transports.nixl.receiver import NAME as NIXL
from kv_transfer.transports.nixl.receiver import NixlReceiver, is_on_device
from kv_transfer.transports.nixl.sender import NixlSender
from kv_transfer.transports.same_host import has_rdma
from kv_transfer.transports.shm.receiver import ShmReceiver
from kv_transfer.transports.shm.sender import ShmSender
from kv_transfer.transports.tcp.receiver import TcpReceiver
from kv_transfer.transports.tcp.sender import TcpSender
from kv_transfer.transports.tcp.settings import PLAIN, TcpSettings
from kv_transfer.transports.torch_dist import communicator
from kv_transfer.transports.torch_dist.receiver import TorchDistReceiver
from kv_transfer.transports.torch_dist.sender import TorchDistSender
from tandem.errors import ConfigError
from tandem.rpc.hosts import is_loopback

_T = TypeVar("_T")
AUTO = "auto"
_CHUNK_BYTES = 8 << 20
_DEVICE_CHUNK_BYTES = 64 << 20
"""Where a GPU copies by itself: a chunk of any size costs the host as much. On an H200 chunks of 8, 32 and 64 MiB went
at 86, 205 and 420 GB/s."""
CUDA = CudaSharing()
"""Default way to share GPU memory; stateless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSite:
    """Parameters for opening either end of a transport."""

    region: KVRegion
    host: str | None = None
    """Address a receiver listens on; None for a sender."""
    fabric: MemoryFabric | None = None
    isolated_network: bool = False
    tcp: TcpSettings = PLAIN
    sharing: DeviceSharing = CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transport:
    receiver: Callable[[TransportSite], KVReceiver]
    sender: Callable[[TransportSite], KVSender]
    obstacle: Callable[[TransportSite], str | None]
    """Returns the reason why the transport cannot work here, even when forced; None when it can."""
    automatic: Callable[[TransportSite], bool] = lambda _place: True
    """Whether to use the transport when none is forced."""
    chunk_bytes: int = _CHUNK_BYTES
    """Bytes to write at once, under one checksum."""
    device_chunk_bytes: int = _CHUNK_BYTES
    """The same, to a pool on a device."""


def _no_fabric(place: TransportSite) -> str | None:
    if place.fabric is None:
        return "joins the workers of one process; between processes use shm or tcp"
    return _unreachable_pool(place)


def _unreachable_pool(place: TransportSite) -> str | None:
    """Reason why writers cannot reach the pool: it is in GPU memory; receivers that copy by themselves are not
    affected."""
    if place.host is None or place.region.device is None:
        return None
    return "cannot write into a KV pool in GPU memory; cuda_ipc, nixl, tcp and torch_dist can"


def _no_shared_memory(place: TransportSite) -> str | None:
    if place.host is None or place.region.fd is not None:
        return None
    return _unreachable_pool(place) or "needs a KV pool in shared memory"


def _no_nixl(place: TransportSite) -> str | None:
    device = place.region.device
    if place.host is not None and device is not None and device.cuda_index is not None and not has_rdma():
        # Measured on an H200: 0.4 GB/s, where tcp makes 2.8; and when a frozen writer was shut out, UCX's "Fatal:
        # unexpected error: Endpoint timeout" ended the receiving process in two of four runs.
        return "needs an RDMA device to write into GPU memory; over TCP take tcp"
    return _local_obstacle("nixl", place.host, isolated_network=place.isolated_network, device=device)


def _takes_nixl(place: TransportSite) -> bool:
    """Whether nixl is chosen by itself. Into GPU memory it must be forced, until RDMA with GPUs has been tried."""
    into_device = place.host is not None and place.region.device is not None
    return place.isolated_network and has_rdma() and not into_device


def _no_communicator(place: TransportSite) -> str | None:
    return _local_obstacle("torch_dist", place.host, isolated_network=place.isolated_network)


def _local_obstacle(
    name: str, host: str | None, *, isolated_network: bool, device: DevicePool | None = None
) -> str | None:
    """Reason why a transport cannot work on this machine, whatever the pool is like.

    `device`: the device of the pool, once there is one; nixl must be able to reach it.
    """
    if name not in ("nixl", "torch_dist"):
        return None
    if not isolated_network and host is not None and not is_loopback(host):
        return f"is neither encrypted nor authenticated: on {host} it needs transfer.isolated_network: true"
    return nixl_agent.problem(device) if name == "nixl" else communicator.problem()


_TRANSPORTS: Mapping[str, _Transport] = {
    "memory": _Transport(
        receiver=lambda p: MemoryReceiver(p.region, _require(p.fabric)),
        sender=lambda p: MemorySender(p.region, _require(p.fabric)),
        obstacle=_no_fabric,
    ),
    "cuda_ipc": _Transport(
        receiver=lambda p: CudaIpcReceiver(p.region, p.sharing),
        sender=lambda p: CudaIpcSender(p.region, p.sharing),
        obstacle=lambda p: p.sharing.problem(p.region),
        chunk_bytes=_DEVICE_CHUNK_BYTES,
        device_chunk_bytes=_DEVICE_CHUNK_BYTES,
    ),
    "shm": _Transport(
        receiver=lambda p: ShmReceiver(p.region), sender=lambda p: ShmSender(p.region), obstacle=_no_shared_memory
    ),
    "nixl": _Transport(
        receiver=lambda p: NixlReceiver(p.region, host=_require(p.host)),
        sender=lambda p: NixlSender(p.region, isolated_network=p.isolated_network),
        obstacle=_no_nixl,
        automatic=_takes_nixl,
        device_chunk_bytes=_DEVICE_CHUNK_BYTES,
    ),
    "torch_dist": _Transport(
        receiver=lambda p: TorchDistReceiver(p.region, host=_require(p.host), isolated_network=p.isolated_network),
        sender=lambda p: TorchDistSender(p.region, isolated_network=p.isolated_network),
        obstacle=_no_communicator,
        automatic=lambda _place: False,
    ),
    "tcp": _Transport(
        receiver=lambda p: TcpReceiver(host=_require(p.host), settings=p.tcp),
        sender=lambda p: TcpSender(p.region, settings=p.tcp),
        obstacle=lambda _place: None,
    ),
}

NAMES = tuple(_TRANSPORTS)
"""Names of the transports, in order of preference."""


def check_choice(choice: str, *, host: str, isolated_network: bool) -> None:
    """Check a forced transport before a model is loaded. Raises ConfigError when it cannot work on this machine.

    `host`: address the worker listens on.
    """
    if (
        choice in _TRANSPORTS
        and (obstacle := _local_obstacle(choice, host, isolated_network=isolated_network)) is not None
    ):
        raise _unusable(choice, obstacle)


def open_receivers(
    region: KVRegion,
    *,
    choice: str = AUTO,
    host: str = "127.0.0.1",
    fabric: MemoryFabric | None = None,
    isolated_network: bool = False,
    tcp: TcpSettings = PLAIN,
    sharing: DeviceSharing = CUDA,
) -> tuple[KVReceiver, ...]:
    """Open the receiving ends of a decode worker: all that can work here, or only the forced one.

    Raises ConfigError when the forced one cannot work here, OSError when `host` cannot be listened on.
    """
    place = TransportSite(
        region=region, host=host, fabric=fabric, isolated_network=isolated_network, tcp=tcp, sharing=sharing
    )
    return tuple(_TRANSPORTS[name].receiver(place) for name in _chosen(choice, place))


def open_senders(
    region: KVRegion,
    *,
    choice: str = AUTO,
    fabric: MemoryFabric | None = None,
    isolated_network: bool = False,
    tcp: TcpSettings = PLAIN,
    sharing: DeviceSharing = CUDA,
) -> tuple[KVSender, ...]:
    """Open the sending ends of a prefill worker, best first. Raises ConfigError when the forced one cannot work."""
    place = TransportSite(region=region, fabric=fabric, isolated_network=isolated_network, tcp=tcp, sharing=sharing)
    return tuple(_TRANSPORTS[name].sender(place) for name in _chosen(choice, place))


def reaches_device(offers: Iterable[TransportOffer]) -> bool:
    """Whether these offers of one receiver say that its pool is on a device."""
    return any(offer.name == CUDA_IPC or (offer.name == NIXL and is_on_device(offer)) for offer in offers)


def candidates(offers: Sequence[TransportOffer], senders: Sequence[KVSender]) -> list[tuple[KVSender, TransportOffer]]:
    """The transports that both sides can use, in the sender's order of preference."""
    return [(sender, offer) for sender in senders for offer in offers if sender.reaches(offer)]


def chunk_bytes_over(transports: Iterable[str], *, to_device: bool = False) -> int:
    """Bytes to write at once where nothing else is set: the least of these transports, a lane's each.

    `to_device`: whether the receiver's pool is known to be on a device.
    """
    used = [_TRANSPORTS[name] for name in transports]
    return min(one.device_chunk_bytes if to_device else one.chunk_bytes for one in used)


def _chosen(choice: str, place: TransportSite) -> list[str]:
    if choice == AUTO:
        return [name for name, one in _TRANSPORTS.items() if one.automatic(place) and one.obstacle(place) is None]
    if choice not in _TRANSPORTS:
        raise ConfigError(f"transfer.transport must be one of {', '.join((AUTO, *NAMES))}, not {choice!r:.40}")
    if (obstacle := _TRANSPORTS[choice].obstacle(place)) is not None:
        raise _unusable(choice, obstacle)
    return [choice]


def _unusable(choice: str, obstacle: str) -> ConfigError:
    return ConfigError(f"transfer.transport is {choice!r}, which {obstacle}")


def _require(value: _T | None) -> _T:
    """Narrow a value whose presence the transport's obstacle check has established."""
    if value is None:
        raise ConfigError("a KV transport was opened where it cannot work")
    return value
