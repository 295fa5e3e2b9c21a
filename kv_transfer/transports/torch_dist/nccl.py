"""A communicator over NCCL, for pools on two GPUs. Imports torch lazily.

torch's groups wait on the calling thread (TORCH_NCCL_BLOCKING_WAIT): then there is no watchdog, which ends
the whole process when an operation fails, and what misses its limit aborts the communicator and raises here. They are
made without blocking (ncclConfig_t.blocking = 0), because ncclCommInitRank otherwise waits for ever for a peer that
died before it came. Both are words in the environment, set before the first transport of a process is opened: the
ranks' groups, which keep their watchdog, are made before that.

Operations run on streams of high priority, of which torch has a set apart: what the engine has queued is not waited
for. There are 32 of them for each GPU, so of more than 16 communicators some share one.
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
"""A chunk of 8 MiB crosses NVLink in 0.2 ms; torch itself would look once in a millisecond."""
_OVERDUE = datetime.timedelta(milliseconds=1)
_HIGH_PRIORITY = -1
_HERE = "sender"
"""In the store: the sender has come."""

log = logging.getLogger(__name__)


class NcclCommunicator(Communicator):
    """`device`: the GPU of this side's pool; the peer's must be another."""

    def __init__(self, group: Any, at: Rendezvous, device: Any) -> None:
        super().__init__(group, at.rank, at.limit)
        self._cuda = importlib.import_module("torch").cuda
        self._device = device
        self._stream = self._cuda.Stream(device, priority=_HIGH_PRIORITY)

    def start(self, tensor: Any, tag: int = 0) -> Any:
        """NCCL knows no tags: it keeps order."""
        with self._cuda.stream(self._stream):
            return super().start(tensor, tag)

    def finish(self, work: Any) -> None:
        ends_s = time.monotonic() + self._limit.total_seconds()
        try:
            while not work.is_completed() and time.monotonic() < ends_s:
                time.sleep(_POLL_S)
            with self._cuda.stream(self._stream):
                # Raises what went wrong; what is not done by now is aborted.
                work.wait(_OVERDUE)
        except RuntimeError as error:
            raise broken(error) from None

    def meet(self) -> None:
        """NCCL connects at the first operation: a byte shows whether the peer is there."""
        torch = importlib.import_module("torch")
        try:
            # Of this stream's memory: that of the default one may still be in use by what the engine has queued.
            with self._cuda.stream(self._stream):
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise broken(error) from None
        self.finish(self.start(byte))

    def close(self) -> None:
        """Where the device itself has failed nothing is known of what moves, and the log says so."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            group.abort()
            # An aborted kernel may still be on its way out, and its tensor is about to be given back. `finish` has
            # made this stream wait for it.
            self._stream.synchronize()
        except RuntimeError:
            log.exception("a NCCL communicator could not be aborted")


def over_nccl(at: Rendezvous, device: Any) -> NcclCommunicator:
    """One for the memory of GPUs. Raises CommunicatorBroken when the other side does not come.

    Each of the few steps of a join has the limit for itself; torch counts it in whole seconds.
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
            # Creating an NCCL id for a sender that never comes would leave a thread behind.
            store.wait([_HERE], at.limit)
        group = NcclCommunicator(nccl(store, at.rank, 2, options), at, device)
    except (RuntimeError, ValueError) as error:
        raise broken(error) from None
    try:
        group.meet()
    except CommunicatorBroken:
        group.close()
        raise
    return group


def prepare(limit_s: float) -> None:
    """Before the first end of a process that may use NCCL. What somebody has set stays."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(ceil(limit_s)))


def problem() -> str | None:
    """Why NCCL cannot be used here; None when it can."""
    distributed = importlib.import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return "needs NCCL, which this build of torch lacks"
    return None
