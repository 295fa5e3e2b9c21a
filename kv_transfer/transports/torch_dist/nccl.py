"""A communicator over NCCL, for pools on two GPUs. Imports torch lazily.

Its process groups wait on the calling thread (TORCH_NCCL_BLOCKING_WAIT): otherwise torch's watchdog would end the whole
process when an operation fails, whereas here a missed limit aborts the communicator and raises. They are created
without blocking (ncclConfig_t.blocking = 0), because ncclCommInitRank would otherwise wait for ever for a peer that
died before it joined. Both are environment variables, set before a process opens its first transport; the groups of the
ranks, which keep their watchdog, are created before that.

Operations run on high-priority streams, which torch keeps apart, so they do not wait for the engine's queued work.
There are 32 of them per GPU; with more than 16 communicators some share one.
"""

import datetime
import importlib
import logging
import os
import time
from math import ceil
from typing import Any

from kv_transfer.transports.torch_dist.communicator import SENDER, Communicator, CommunicatorBroken, Rendezvous, broken

_POLL_S = 5e-5
"""Polling period: a chunk of 8 MiB crosses NVLink in 0.2 ms, and torch itself would poll once per millisecond."""
_OVERDUE = datetime.timedelta(milliseconds=1)
_HIGH_PRIORITY = -1
_HERE = "sender"
"""Key in the store that reports that the sender has joined."""

log = logging.getLogger(__name__)


class NcclCommunicator(Communicator):
    """Communicator between two GPUs; `device` is that of this side's pool, and the peer's must be another."""

    def __init__(self, group: Any, at: Rendezvous, device: Any) -> None:
        super().__init__(group, at.rank, at.limit)
        self._cuda = importlib.import_module("torch").cuda
        self._device = device
        self._stream = self._cuda.Stream(device, priority=_HIGH_PRIORITY)

    def start(self, tensor: Any, tag: int = 0) -> Any:
        """See Communicator; `tag` is ignored, because NCCL keeps the order."""
        with self._cuda.stream(self._stream):
            return super().start(tensor, tag)

    def finish(self, work: Any) -> None:
        ends_s = time.monotonic() + self._limit.total_seconds()
        try:
            while not work.is_completed() and time.monotonic() < ends_s:
                time.sleep(_POLL_S)
            with self._cuda.stream(self._stream):
                # Raises the operation's error; an operation that is not done by now is aborted.
                work.wait(_OVERDUE)
        except RuntimeError as error:
            raise broken(error) from None

    def connect(self) -> None:
        """Exchange a byte: NCCL connects at the first operation, which fails when the peer is not there."""
        torch = importlib.import_module("torch")
        try:
            # Allocated on this stream: memory of the default one may still be used by the engine's queued work.
            with self._cuda.stream(self._stream):
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise broken(error) from None
        self.finish(self.start(byte))

    def close(self) -> None:
        """Abort the communicator. After an error of the device itself, which is logged, bytes may still be moving."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            group.abort()
            # An aborted kernel may still be ending while its tensor is about to be freed; `finish` has made this stream
            # wait for it.
            self._stream.synchronize()
        except RuntimeError:
            log.exception("a NCCL communicator could not be aborted")


def over_nccl(at: Rendezvous, device: Any) -> NcclCommunicator:
    """Create a communicator for the memory of GPUs. Raises CommunicatorBroken when the other side does not join in
    time.

    Each step of a join has the limit for itself; torch rounds it to whole seconds.
    """
    nccl = importlib.import_module("torch").distributed.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = at.limit
    options.config.blocking = 0
    store = at.place()
    try:
        if at.rank == SENDER:
            store.set(_HERE, b"")
        else:
            # Creating an NCCL id for a sender that never joins would leave a thread behind.
            store.wait([_HERE], at.limit)
        group = NcclCommunicator(nccl(store, at.rank, 2, options), at, device)
    except (RuntimeError, ValueError) as error:
        raise broken(error) from None
    try:
        group.connect()
    except CommunicatorBroken:
        group.close()
        raise
    return group


def prepare(limit_s: float) -> None:
    """Set NCCL's environment variables, unless they are set already; called before the first end that may use NCCL."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(ceil(limit_s)))


def problem() -> str | None:
    """Reason why NCCL cannot be used here; None when it can."""
    distributed = importlib.import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return "needs NCCL, which this build of torch lacks"
    return None
