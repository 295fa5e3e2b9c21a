"""Passes tensors in order between two processes through a torch process group. Imports torch lazily.

Every wait has a time limit, and a communicator that missed one is broken. Both sides then make a new one; messages of
the old one cannot reach it, because each has a number and hence its own prefix in the store.
"""

import datetime
import importlib
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.torch_dist.wire import BURST_BYTES, RendezvousOffer
from tandem.errors import TransferError

Bytes = npt.NDArray[np.uint8]
SLOTS = 2
"""Bursts in flight: one crosses while the other is filled or emptied."""
RECEIVER, SENDER = 0, 1
"""Ranks in the process group."""


class CommunicatorBroken(TransferError):
    """The communicator missed a time limit, or its other side has ended: a new one is needed."""


class Communicator:
    """One side of a process group; used by one thread. Methods raise CommunicatorBroken."""

    def __init__(self, group: Any, rank: int, limit: datetime.timedelta) -> None:
        self._group = group
        self._peer = 1 - rank
        self._limit = limit

    def start(self, tensor: Any, tag: int = 0) -> Any:
        """Start to send a tensor or, on the receiver, to receive one; returns a handle for `finish`."""
        if self._group is None:
            raise CommunicatorBroken("the communicator is closed")
        move = self._group.send if self._peer == RECEIVER else self._group.recv
        try:
            return move([tensor], self._peer, tag)
        except RuntimeError as error:
            raise broken(error) from None

    def finish(self, work: Any) -> None:
        """Wait until the tensor of this handle has crossed."""
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise broken(error) from None

    def close(self) -> None:
        """Break the communicator; the other side's calls fail. On return nothing moves any more."""
        self._group = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Parameters by which the two sides of one communicator find each other."""

    store: Any
    meeting: RendezvousOffer
    number: int
    rank: int
    address: str
    """Address of this side, for communicators over sockets."""
    limit_s: float

    @property
    def limit(self) -> datetime.timedelta:
        """Time limit of one waiting call."""
        return datetime.timedelta(seconds=self.limit_s)

    def place(self) -> Any:
        """The store under the prefix of this communicator, which no other uses."""
        distributed = importlib.import_module("torch.distributed")
        return distributed.PrefixStore(f"{self.meeting.prefix}/{self.number}", self.store)


def over_gloo(at: Rendezvous) -> Communicator:
    """Create a communicator for host memory. Raises CommunicatorBroken when the other side does not join in time."""
    distributed = importlib.import_module("torch.distributed")
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = at.limit
    options._threads = 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=at.address)]
    try:
        group = distributed.ProcessGroupGloo(at.place(), at.rank, 2, options)
    except RuntimeError as error:
        raise broken(error) from None
    return Communicator(group, at.rank, at.limit)


class Slots:
    """Bursts of host memory that cross in rotation. Methods raise CommunicatorBroken."""

    def __init__(self, group: Communicator) -> None:
        torch = importlib.import_module("torch")
        self._group = group
        self._tensors = [torch.empty(BURST_BYTES, dtype=torch.uint8) for _ in range(SLOTS)]
        self._works: list[Any] = [None] * SLOTS
        self.bytes: list[Bytes] = [tensor.numpy() for tensor in self._tensors]

    def post(self, slot: int, num_bytes: int) -> None:
        """Start to send or receive the first `num_bytes` of a slot."""
        self._works[slot] = self._group.start(self._tensors[slot][:num_bytes], slot)

    def wait(self, slot: int) -> None:
        """Wait until the slot's last `post`, if there was one, has crossed."""
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            self._group.finish(work)


def broken(error: Exception) -> CommunicatorBroken:
    """Convert an error of torch, shortened to its first line."""
    return CommunicatorBroken(f"communicator: {_first_line(error)}")


def problem() -> str | None:
    """Reason why gloo cannot be used here; None when it can."""
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        return f"needs torch, which is not installed ({error})"
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "needs gloo, which this build of torch lacks"
    return None


def serve_store(host: str, limit_s: float) -> Any:
    """Create a store on a free port of `host` and on no other address. Raises OSError."""
    distributed = importlib.import_module("torch.distributed")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    port = server.getsockname()[1]
    limit = datetime.timedelta(seconds=limit_s)
    options = {"is_master": True, "wait_for_workers": False, "timeout": limit, "master_listen_fd": server.detach()}
    return distributed.TCPStore(host, port, **options)


def reach_store(host: str, port: int, limit_s: float) -> Any:
    """Connect to the receiver's store. Raises TransferError."""
    distributed = importlib.import_module("torch.distributed")
    limit = datetime.timedelta(seconds=limit_s)
    try:
        return distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise TransferError(f"store at {host}:{port}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
