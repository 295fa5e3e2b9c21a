"""Two processes and a torch process group between them: pieces of payload go across, in order. Imports torch lazily.

A call that waits has a limit, and a communicator that missed one is broken: gloo closes its pair then. Both sides make
a new one; the old one's messages cannot reach it, since each has a number and by it a name of its own in the store.
"""

import datetime
import importlib
import socket
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.torch_dist_wire import PIECE_BYTES, Meeting
from tandem.errors import TransferError

Bytes = npt.NDArray[np.uint8]
GLOO = "gloo"
SLOTS = 2
"""Pieces under way: one crosses while the other is filled or emptied."""
RECEIVER, SENDER = 0, 1
"""Ranks."""


class CommunicatorBroken(TransferError):
    """It missed a limit, or its other side has ended: a new one is needed."""


class Communicator:
    """One side's end; used by one thread. Raises CommunicatorBroken."""

    def __init__(self, store: Any, meeting: Meeting, number: int, rank: int, *, address: str, limit_s: float) -> None:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
        self._peer = 1 - rank
        self._limit = datetime.timedelta(seconds=limit_s)
        self._tensors = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(SLOTS)]
        self.slots: list[Bytes] = [tensor.numpy() for tensor in self._tensors]
        self._works: list[Any] = [None] * SLOTS
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = self._limit
        options._threads = 1
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
        prefixed = distributed.PrefixStore(f"{meeting.prefix}/{number}", store)
        try:
            self._group: Any = distributed.ProcessGroupGloo(prefixed, rank, 2, options)
        except RuntimeError as error:
            raise CommunicatorBroken(f"no communicator: {_first_line(error)}") from None

    def post(self, slot: int, num_bytes: int) -> None:
        """Sender: let the first bytes of a slot go; receiver: let them come. Raises CommunicatorBroken."""
        if self._group is None:
            raise CommunicatorBroken("the communicator is closed")
        tensors = [self._tensors[slot][:num_bytes]]
        try:
            move = self._group.send if self._peer == RECEIVER else self._group.recv
            self._works[slot] = move(tensors, self._peer, slot)
        except RuntimeError as error:
            raise CommunicatorBroken(f"communicator: {_first_line(error)}") from None

    def wait(self, slot: int) -> None:
        """Until the slot's last `post` has crossed, if there was one. Raises CommunicatorBroken."""
        work, self._works[slot] = self._works[slot], None
        if work is None:
            return
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise CommunicatorBroken(f"communicator: {_first_line(error)}") from None

    def close(self) -> None:
        """Break it; the other side's calls fail."""
        self._works = [None] * SLOTS
        self._group = None


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
