"""A communicator over NCCL, for pools on two GPUs. Imports torch lazily.

torch's group is told to wait on the calling thread (TORCH_NCCL_BLOCKING_WAIT): then there is no watchdog, which ends
the whole process when an operation fails, and what misses its limit aborts the communicator and raises here. It is made
without blocking (ncclConfig_t.blocking = 0), because ncclCommInitRank otherwise waits for ever for a peer that died
before it came: its limit is read from the environment too, once in a process, and concerns such groups alone.

Every operation runs on a stream of the communicator's own, so what the engine has queued is not waited for.
"""

import datetime
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

from kv_transfer.transports.communicator import Communicator, CommunicatorBroken, Rendezvous, broken

_POLL_S = 5e-5
"""A chunk of 8 MiB crosses NVLink in 0.2 ms; torch itself would look once in a millisecond."""
_OVERDUE = datetime.timedelta(milliseconds=1)
_ENVIRONMENT = threading.Lock()
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

log = logging.getLogger(__name__)


class NcclCommunicator(Communicator):
    """See Communicator. `device`: the GPU of this side's pool; the peer's must be another."""

    def __init__(self, group: Any, at: Rendezvous, device: Any) -> None:
        super().__init__(group, at.rank, at.limit)
        self._cuda = importlib.import_module("torch").cuda
        self._device = device
        self._stream = self._cuda.Stream(device)

    def start(self, tensor: Any, tag: int = 0) -> Any:
        """See Communicator. NCCL knows no tags: it keeps order."""
        with self._cuda.stream(self._stream):
            return super().start(tensor, tag)

    def finish(self, work: Any) -> None:
        """See Communicator."""
        ends_s = time.monotonic() + self._limit.total_seconds()
        try:
            while not work.is_completed() and time.monotonic() < ends_s:
                time.sleep(_POLL_S)
            with self._cuda.stream(self._stream):
                # Raises what went wrong; what is not done by now is aborted.
                work.wait(_OVERDUE)
        except RuntimeError as error:
            raise broken(error) from None

    def close(self) -> None:
        """See Communicator."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            group.abort()
            # An aborted kernel may still be on its way out, and its tensor is about to be given back.
            self._cuda.synchronize(self._device)
        except RuntimeError:
            # The device itself has failed; whoever closes has other things to give back.
            log.exception("a NCCL communicator could not be aborted")


def over_nccl(at: Rendezvous, device: Any) -> NcclCommunicator:
    """One for the memory of GPUs. Raises CommunicatorBroken when the other side does not come."""
    torch = importlib.import_module("torch")
    nccl = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = at.limit
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(ceil(at.limit_s)))
    try:
        with _waiting_on_the_caller():
            made = nccl(at.place(), at.rank, 2, options)
        group = NcclCommunicator(made, at, device)
    except (RuntimeError, ValueError) as error:
        raise broken(error) from None
    try:
        # NCCL connects at the first operation; one that costs nothing shows whether the peer is there.
        group.finish(group.start(torch.zeros(1, dtype=torch.uint8, device=device)))
    except CommunicatorBroken:
        group.close()
        raise
    return group


def problem() -> str | None:
    """Why NCCL cannot be used here; None when it can."""
    distributed = importlib.import_module("torch.distributed")
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return "needs NCCL, which this build of torch lacks"
    return None


@contextmanager
def _waiting_on_the_caller() -> Iterator[None]:
    """For the groups made within; those of ranks keep their watchdog."""
    with _ENVIRONMENT:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before
