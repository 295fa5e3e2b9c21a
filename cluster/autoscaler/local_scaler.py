"""Scales a `tandem up` cluster on this host through its control socket. It supports flips, as it owns its workers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from cluster.control.wire import (
    ControlMessage,
    ControlReply,
    FlipRequest,
    ProcessStatus,
    ScaleRequest,
    StatusRequest,
    encode_message,
)
from cluster.planner.orders import Order, OrderFailed
from cluster.planner.values import FleetView, Sizes
from tandem.process.runtime_folder import is_trusted_peer
from tandem.values.roles import WorkerRole

_ANSWER_S = 5.0
_MOST_LINE_BYTES = 1 << 20
_LEAVES = frozenset({"retiring", "abandoned", "exited"})
_COMES = frozenset({"pending", "starting", "backoff"})


class ControlScaler:
    """Scales through the control socket, for any user allowed to open it."""

    can_flip = True

    def __init__(self, path: Path) -> None:
        """`path`: path of the control socket."""
        self._path = path

    async def fleet(self) -> FleetView:
        """Return the present sizes. Raises OrderFailed, also during a change, when the sizes mean nothing."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self._ask(StatusRequest())
        except TimeoutError:
            raise OrderFailed(f"the cluster at {self._path} has not answered for {_ANSWER_S:g} s") from None
        if reply.processes is None:
            raise OrderFailed(f"the cluster at {self._path} did not list its processes")
        if reply.changing:
            raise OrderFailed("another change of the cluster is in progress")
        return FleetView(
            sizes=_count(reply.processes, _LEAVES, counted=False), starting=_count(reply.processes, _COMES)
        )

    async def carry_out(self, order: Order) -> None:
        """Carry out the flips one after another, then set the sizes. Raises OrderFailed."""
        for role in order.flips:
            await self._order(FlipRequest(to=role.value, yields=True))
        if order.flipped != order.after:
            sizes = order.after
            await self._order(ScaleRequest(prefill=sizes.prefill, decode=sizes.decode, yields=True))

    async def _order(self, request: FlipRequest | ScaleRequest) -> None:
        try:
            await self._ask(request)
        except OrderFailed as error:
            if ".yields: " not in str(error):
                raise
            # A supervisor of the previous version has rejected the field and changed nothing.
            await self._ask(request.model_copy(update={"yields": None}))

    async def _ask(self, request: ControlMessage) -> ControlReply:
        """Return the reply with the processes if there is one, else the last reply. Raises OrderFailed."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_MOST_LINE_BYTES)
        except OSError as error:
            raise OrderFailed(f"no cluster answers at {self._path}: {error.strerror or error}") from None
        try:
            if not is_trusted_peer(writer.get_extra_info("socket")):
                raise OrderFailed(f"another user answers at {self._path}")
            writer.write(encode_message(request))
            processes: tuple[ProcessStatus, ...] | None = None
            changing: bool | None = None
            while line := await reader.readline():
                reply = ControlReply.model_validate_json(line)
                if reply.processes is not None:
                    processes, changing = reply.processes, reply.changing
                if reply.done is not None:
                    if not reply.done:
                        raise OrderFailed(reply.reason or "the cluster gave no reason")
                    return reply.model_copy(update={"processes": processes, "changing": changing})
        except (OSError, ValueError, ValidationError) as error:
            raise OrderFailed(f"{self._path}: {error}") from None
        finally:
            writer.close()
        raise OrderFailed("the cluster stopped before the change was complete")


def _count(processes: Sequence[ProcessStatus], states: frozenset[str], *, counted: bool = True) -> Sizes:
    """Count the workers in one of these states, or in none of them unless `counted`."""
    found = [process.role for process in processes if (process.state in states) is counted]
    return Sizes(prefill=found.count(WorkerRole.PREFILL.value), decode=found.count(WorkerRole.DECODE.value))
