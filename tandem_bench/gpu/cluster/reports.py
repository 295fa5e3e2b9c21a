"""What the workers of a cluster report, read from its router."""

import asyncio
import time
from dataclasses import dataclass

from tandem_bench.client import Client

_REPORTS_S = 5.0
"""Time within which what workers have counted reaches the router; their heartbeats are 0.25 s apart."""
_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Hand-offs of all workers since their start, as they have reported them to the router."""

    count: float
    """Those whose receivers committed them."""
    num_bytes: float
    seconds: float
    """Time that senders spent writing."""


async def reported(client: Client, transport: str, *, at_least: float) -> Reported:
    """Read the hand-offs over one transport, after waiting a little for a count."""
    deadline_s = time.monotonic() + _REPORTS_S
    while True:
        count = await _total(client, "tandem_worker_transfers_total", transport, "received")
        if count >= at_least or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_PERIOD_S)
    return Reported(
        count=count,
        num_bytes=await _total(client, "tandem_worker_transfer_bytes_total", transport, "received"),
        seconds=await _total(client, "tandem_worker_transfer_seconds_total", transport, "sent"),
    )


async def _total(client: Client, metric: str, transport: str, direction: str) -> float:
    samples = await client.samples(
        metric, transport=transport, direction=direction, kind="handoff", outcome="committed"
    )
    return sum(value for _, value in samples)


async def until_live(client: Client, role: str, count: int) -> None:
    """Wait until so many workers of a pool serve; the caller bounds the time."""
    while True:
        live = await client.samples("tandem_workers", role=role, state="live")
        if sum(value for _, value in live) >= count:
            return
        await asyncio.sleep(_PERIOD_S)
