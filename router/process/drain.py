"""Drains a router: new connections go to the process that has its ports next, accepted requests are finished."""

import asyncio
import time
from enum import Enum

from router.dispatch.dispatcher import Dispatcher
from router.grpc.server import GrpcServer
from router.http.server.http_server import HttpServer
from router.process.port_steering import steer_to_last

_HAND_OVER_S = 1.0
"""Idle time after which a process that is leaving its ports to others closes a connection."""
_QUEUE_S = 0.1
"""Time for gRPC to accept the connections in its queue."""


class PortTakeover(Enum):
    """Server that listens at the ports after this process has closed them."""

    NOBODY = "nobody"
    OTHERS = "others"
    """Other processes that listen on the same ports."""
    LAST_OF_TWO = "last of two"
    """One process that listens there, and started later."""
    SUCCESSOR = "successor"
    """A process that has the same HTTP socket, and listens on the same gRPC port."""


async def drain(
    dispatcher: Dispatcher,
    http: HttpServer,
    rpc: GrpcServer,
    *,
    drain_s: float,
    leaves_to: PortTakeover = PortTakeover.NOBODY,
) -> None:
    """Refuse new requests on both servers, let accepted ones end, close both: all within one bound.

    The servers of a single router keep listening until then, so that clients get a refusal with Retry-After instead of
    a refused connection. Where others share the ports they get new connections at once, and connected clients have a
    moment to be served.
    """
    ends_s, is_alone = time.monotonic() + drain_s, leaves_to is PortTakeover.NOBODY
    await rpc.set_serving(False)
    async with asyncio.TaskGroup() as closing:
        if not is_alone:
            await _steer(http, rpc, leaves_to)
            closing.create_task(rpc.stop(drain_s))
            # The other half is reserved for long answers.
            inherits = leaves_to is PortTakeover.SUCCESSOR
            await http.hand_over(idle_s=_HAND_OVER_S, most_s=drain_s / 2, is_inherited=inherits)
        await dispatcher.drain(most_s=max(0.0, ends_s - time.monotonic()))
        left_s = max(0.0, ends_s - time.monotonic())
        closing.create_task(http.stop(left_s))
        if is_alone:
            closing.create_task(rpc.stop(left_s))


async def _steer(http: HttpServer, rpc: GrpcServer, leaves_to: PortTakeover) -> None:
    """Let the kernel give new connections to the other listener, where exactly one started after this one."""
    if leaves_to is PortTakeover.OTHERS:
        return
    steer_to_last(rpc.port)
    if leaves_to is PortTakeover.LAST_OF_TWO:
        steer_to_last(http.port)
    await asyncio.sleep(_QUEUE_S)
