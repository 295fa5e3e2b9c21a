"""Time limits that are short enough for thousands of transfers, and long enough for a busy machine."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.transports import dial, same_host_sockets
from kv_transfer.transports.one_sided import receiver as one_sided_receiver
from kv_transfer.transports.one_sided import writer as one_sided_writer
from kv_transfer.transports.tcp import sender as tcp_sender

STALL_S = 0.3
"""Of the transports."""
LONG_STALL_S = 0.45
"""More than a transport forgives, and than a writer may take to prove that it is quiet."""
LONG_SILENCE_S = 0.6
"""More than a lease."""
WAIT_S = 20.0
"""Nothing takes so long: what does has hung."""

_SLICE_S = 0.5
_LIMITS = (
    (one_sided_writer, "CLAIM_S", 0.4),
    (same_host_sockets, "CONNECT_S", 0.5),
    (tcp_sender, "CONNECT_S", 0.5),
    (dial, "CONNECT_S", 0.5),
    (one_sided_receiver, "HELLO_S", 0.4),
)


def settings(*, chunk_bytes: int, wire_dtype: str, write_window: int) -> TransferSettings:
    """Return transfer settings, for both hubs, whose time limits are short."""
    return TransferSettings(
        lease_s=0.4,
        stall_s=0.6,
        queue_s=1.0,
        drain_s=0.1,
        reroute_s=WAIT_S,
        chunk_bytes=chunk_bytes,
        wire_dtype=wire_dtype,
        write_window=write_window,
        sweep_s=0.02,
        connect_s=0.6,
        max_backoff_s=0.04,
    )


async def ends_in(coroutine: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Whether it ends in time; else it is cancelled. Time in which this process stands still counts for little."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(max(1, round(seconds / _SLICE_S))):
        done, _pending = await asyncio.wait({task}, timeout=_SLICE_S)
        if done:
            await task
            return True
    task.cancel()
    await asyncio.wait({task})
    return False


@contextmanager
def impatient() -> Iterator[None]:
    """The limits that no setting reaches, for as long as this is entered."""
    before = [(module, name, getattr(module, name)) for module, name, _ in _LIMITS]
    for module, name, seconds in _LIMITS:
        setattr(module, name, seconds)
    try:
        yield
    finally:
        for module, name, seconds in before:
            setattr(module, name, seconds)
