"""Which transports exist, in order of preference, and how a worker opens both kinds of end."""

from collections.abc import Sequence

from kv_transfer.messages import TransportOffer
from kv_transfer.region import KVRegion
from kv_transfer.transport import KVReceiver, KVSender
from kv_transfer.transports.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.transports.shm_receiver import ShmReceiver
from kv_transfer.transports.shm_sender import ShmSender
from kv_transfer.transports.tcp_receiver import TcpReceiver
from kv_transfer.transports.tcp_sender import TcpSender
from kv_transfer.transports.tcp_settings import PLAIN, TcpSettings
from tandem.errors import ConfigError

AUTO = "auto"
NAMES = ("memory", "shm", "tcp")
"""Best first."""


def open_receivers(
    region: KVRegion,
    *,
    choice: str = AUTO,
    host: str = "127.0.0.1",
    fabric: MemoryFabric | None = None,
    tcp: TcpSettings = PLAIN,
) -> tuple[KVReceiver, ...]:
    """Receiving ends of a decode worker: all that can work here, or the one that is forced.

    Raises ConfigError when the forced one cannot work here, OSError when `host` cannot be listened on.
    """
    _check(choice, fabric)
    if choice == "shm" and region.fd is None:
        raise ConfigError("KV transport 'shm' needs a KV pool in shared memory")
    receivers: list[KVReceiver] = []
    if fabric is not None and choice in (AUTO, "memory"):
        receivers.append(MemoryReceiver(region, fabric))
    if choice == "shm" or (choice == AUTO and region.fd is not None):
        receivers.append(ShmReceiver(region))
    if choice in (AUTO, "tcp"):
        receivers.append(TcpReceiver(host=host, settings=tcp))
    return tuple(receivers)


def open_senders(
    region: KVRegion, *, choice: str = AUTO, fabric: MemoryFabric | None = None, tcp: TcpSettings = PLAIN
) -> tuple[KVSender, ...]:
    """Sending ends of a prefill worker, best first. Raises ConfigError when the forced one cannot work here."""
    _check(choice, fabric)
    senders: list[KVSender] = []
    if fabric is not None and choice in (AUTO, "memory"):
        senders.append(MemorySender(region, fabric))
    if choice in (AUTO, "shm"):
        senders.append(ShmSender(region))
    if choice in (AUTO, "tcp"):
        senders.append(TcpSender(region, settings=tcp))
    return tuple(senders)


def _check(choice: str, fabric: MemoryFabric | None) -> None:
    if choice not in (AUTO, *NAMES):
        raise ConfigError(f"KV transport {choice!r:.40} is none of {', '.join((AUTO, *NAMES))}")
    if choice == "memory" and fabric is None:
        raise ConfigError("KV transport 'memory' joins the workers of one process; between processes use shm or tcp")


def candidates(offers: Sequence[TransportOffer], senders: Sequence[KVSender]) -> list[tuple[KVSender, TransportOffer]]:
    """What both sides can do, best first by the sender's order."""
    return [(sender, offer) for sender in senders for offer in offers if sender.reaches(offer)]
