"""Two processes and a torch process group between them: tensors go across, in order. Imports torch lazily.

A call that waits has a limit, and a communicator that missed one is broken. Both sides make a new one; the old one's
messages cannot reach it, since each has a number and by it a name of its own in the store.
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
"""Pieces under way: one crosses while the other is filled or emptied."""
RECEIVER, SENDER = 0, 1
"""Ranks."""


class CommunicatorBroken(TransferError):
    """It missed a limit, or its other side has ended: a new one is needed."""


class Communicator:
    """One side's end of a process group; used by one thread. Methods raise CommunicatorBroken."""

    def __init__(self, group: Any, rank: int, limit: datetime.timedelta) -> None:
        self._group = group
        self._peer = 1 - rank
        self._limit = limit

    def start(self, tensor: Any, tag: int = 0) -> Any:
        """Sender: let a tensor's bytes go; receiver: let them come. What `finish` takes."""
        if self._group is None:
            raise CommunicatorBroken("the communicator is closed")
        move = self._group.send if self._peer == RECEIVER else self._group.recv
        try:
            return move([tensor], self._peer, tag)
        except RuntimeError as error:
            raise broken(error) from None

    def finish(self, work: Any) -> None:
        """Until that has crossed."""
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise broken(error) from None

    def close(self) -> None:
        """Break it; the other side's calls fail. Nothing moves any more when this returns."""
        self._group = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where one side finds the other for one communicator."""

    store: Any
    meeting: RendezvousOffer
    number: int
    rank: int
    address: str
    """Of this side, for what goes over sockets."""
    limit_s: float

    @property
    def limit(self) -> datetime.timedelta:
        """Most time for one call that waits."""
        return datetime.timedelta(seconds=self.limit_s)

    def place(self) -> Any:
        """The part of the store in which both sides make this communicator and no other."""
        distributed = importlib.import_module("torch.distributed")
        return distributed.PrefixStore(f"{self.meeting.prefix}/{self.number}", self.store)


def over_gloo(at: Rendezvous) -> Communicator:
    """One for host memory. Raises CommunicatorBroken when the other side does not come."""
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
    """Pieces of host memory that cross in turn. Methods raise CommunicatorBroken."""

    def __init__(self, group: Communicator) -> None:
        torch = importlib.import_module("torch")
        self._group = group
        self._tensors = [torch.empty(BURST_BYTES, dtype=torch.uint8) for _ in range(SLOTS)]
        self._works: list[Any] = [None] * SLOTS
        self.bytes: list[Bytes] = [tensor.numpy() for tensor in self._tensors]

    def post(self, slot: int, num_bytes: int) -> None:
        """Let the first bytes of a slot cross."""
        self._works[slot] = self._group.start(self._tensors[slot][:num_bytes], slot)

    def wait(self, slot: int) -> None:
        """Until the slot's last `post` has crossed, if there was one."""
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            self._group.finish(work)


def broken(error: Exception) -> CommunicatorBroken:
    """What torch said, in a line."""
    return CommunicatorBroken(f"communicator: {_first_line(error)}")


def problem() -> str | None:
    """Why gloo cannot be used here; None when it can."""
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        return f"needs torch, which is not installed ({error})"
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "needs gloo, which this build of torch lacks"
    return None


def serve_store(host: str, limit_s: float) -> Any:
    """A store on a free port of `host` and no other address. Raises OSError."""
    distributed = importlib.import_module("torch.distributed")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    port = server.getsockname()[1]
    limit = datetime.timedelta(seconds=limit_s)
    options = {"is_master": True, "wait_for_workers": False, "timeout": limit, "master_listen_fd": server.detach()}
    return distributed.TCPStore(host, port, **options)


def reach_store(host: str, port: int, limit_s: float) -> Any:
    """The receiver's store. Raises TransferError."""
    distributed = importlib.import_module("torch.distributed")
    limit = datetime.timedelta(seconds=limit_s)
    try:
        return distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise TransferError(f"store at {host}:{port}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
