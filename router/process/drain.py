"""How a router ends: what is new goes to whoever has its doors next, what was accepted is finished."""

import asyncio
import time
from enum import Enum

from router.dispatch.dispatcher import Dispatcher
from router.grpc.server import GrpcServer
from router.http.server.http_server import HttpServer
from router.process.port_steering import steer_to_last

_HAND_OVER_S = 1.0
"""After it a client that is connected to a process that leaves its doors to others is thought to ask nothing more."""
_QUEUE_S = 0.1
"""For gRPC to take what is in its queue."""


class PortTakeover(Enum):
    """Who has the doors when this process has left them."""

    NOBODY = "nobody"
    OTHERS = "others"
    """They listen at the same ports."""
    LAST_OF_TWO = "last of two"
    """One process does that, and it came later."""
    SUCCESSOR = "successor"
    """It has the very socket of the HTTP door, and listens at the same gRPC port."""


async def drain(
    dispatcher: Dispatcher,
    http: HttpServer,
    rpc: GrpcServer,
    *,
    drain_s: float,
    leaves_to: PortTakeover = PortTakeover.NOBODY,
) -> None:
    """Refuse what is new at both doors, let what was accepted end, close both: all within one bound.

    The doors of a router that is alone listen until then, so that a client is told to go elsewhere rather than find
    nobody. Where others share them they have what is new at once, and who is connected has a moment to be served.
    """
    ends_s, is_alone = time.monotonic() + drain_s, leaves_to is PortTakeover.NOBODY
    await rpc.set_serving(False)
    async with asyncio.TaskGroup() as closing:
        if not is_alone:
            await _steer(http, rpc, leaves_to)
            closing.create_task(rpc.stop(drain_s))
            # The other half is for those whose answers are long.
            inherits = leaves_to is PortTakeover.SUCCESSOR
            await http.hand_over(idle_s=_HAND_OVER_S, most_s=drain_s / 2, is_inherited=inherits)
        await dispatcher.drain(most_s=max(0.0, ends_s - time.monotonic()))
        left_s = max(0.0, ends_s - time.monotonic())
        closing.create_task(http.stop(left_s))
        if is_alone:
            closing.create_task(rpc.stop(left_s))


async def _steer(http: HttpServer, rpc: GrpcServer, leaves_to: PortTakeover) -> None:
    """Have the kernel bring what is new to the other listener, where there is one and it is the last."""
    if leaves_to is PortTakeover.OTHERS:
        return
    steer_to_last(rpc.port)
    if leaves_to is PortTakeover.LAST_OF_TWO:
        steer_to_last(http.port)
    await asyncio.sleep(_QUEUE_S)
