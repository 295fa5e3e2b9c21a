"""`torch_dist` from device to device: whether two pools allow it, and the communicator between them.

GPUs use NCCL. torch pools on a CPU use the same code over gloo, so that tests cover it without a GPU.
"""

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.transports.torch_dist import nccl
from kv_transfer.transports.torch_dist.communicator import Communicator, Rendezvous, over_gloo
from kv_transfer.transports.torch_dist.wire import RendezvousOffer

_CPU = "cpu"
_GPU = "cuda "


def direct_device(region: KVRegion, *, isolated_network: bool) -> str:
    """The identity of this worker's device if payload may go directly into its pool, otherwise "".

    NCCL chooses where it listens, encrypts nothing and authenticates nobody, so GPUs need an isolated network.
    """
    if region.device is None:
        return ""
    identity = region.device.identity
    if identity == _CPU or (identity.startswith(_GPU) and isolated_network and nccl.problem() is None):
        return identity
    return ""


def can_write_directly(region: KVRegion, pairing: Pairing, meeting: RendezvousOffer, *, isolated_network: bool) -> bool:
    """Whether payload may go directly to that receiver's device; payload that is converted goes through host memory."""
    own = direct_device(region, isolated_network=isolated_network)
    if not own or not meeting.device or pairing.at_departure() is not None or pairing.at_arrival() is not None:
        return False
    if _CPU in (own, meeting.device):
        return own == meeting.device
    # NCCL cannot connect a GPU to itself.
    return own != meeting.device


def between_devices(pool: DevicePool, at: Rendezvous) -> Communicator:
    """Create a communicator for tensors on the pool's kind of device. Raises CommunicatorBroken."""
    if pool.identity == _CPU:
        return over_gloo(at)
    return nccl.over_nccl(at, pool.memory.device)
