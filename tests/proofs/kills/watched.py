"""A worker that says more of itself than its metrics do: every attempt under way, with whom, and how each one ended.

Nothing of what the worker does is changed. It answers on a Unix socket, one JSON line for each line that it is asked.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.scheduler.scheduler import Scheduler
from kv_transfer.protocol.states import LIVE, HandoffState
from kv_transfer.session.attempt import Attempt
from kv_transfer.session.receiver_attempt import ReceiverAttempt
from tandem.errors import InvariantError
from tandem.values.ids import BlockId, RequestId
from worker.kv_exchange.service import Fabric, FabricPlan

_MOVING = (HandoffState.STREAMING, HandoffState.SEALED)
_NOTED = ("on_message", "on_event", "on_timer")


class Ledger:
    """How attempts ended that came to nothing, in order."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self.num_quarantined = 0
        """Attempts, since start."""
        self.freezes = False
        """Stop this process (SIGSTOP) as soon as blocks of a fetch move."""

    def observe(self) -> None:
        """From now on every attempt of this process is noted."""
        for name in _NOTED:
            setattr(Attempt, name, self._noting(getattr(Attempt, name)))

    def _noting(self, method: Any) -> Any:
        def noting(attempt: Any, change: Any) -> None:
            before, num_blocks = attempt.machine.state, held_by(attempt)
            method(attempt, change)
            after = attempt.machine.state
            if before in LIVE and after not in (*LIVE, HandoffState.COMMITTED) and not committed(attempt):
                end = {"state": before.value, "blocks": num_blocks, "at_s": time.monotonic()}
                self.ends.append(summary_of(attempt) | end)
            if after is HandoffState.QUARANTINED and before is not after:
                self.num_quarantined += 1
            if self.freezes and after in _MOVING and before is not after and attempt.machine.plan.job.fetch:
                self.freezes = False
                os.kill(os.getpid(), signal.SIGSTOP)

        return noting


def committed(attempt: Any) -> bool:
    """Whether what it was for has been done."""
    return attempt._tally.outcome is not None and attempt._tally.outcome.value == "committed"


def held_by(attempt: Any) -> int:
    """Blocks that a peer may write, or that are kept for it."""
    machine = attempt.machine
    return machine.num_leased_blocks if isinstance(attempt, ReceiverAttempt) else machine.num_pinned_blocks


def in_quarantine(attempt: Any) -> Sequence[BlockId]:
    """Destinations whose writer may be alive, though nobody wants what it writes."""
    return attempt.machine._blocks if attempt.machine.state is HandoffState.QUARANTINED else ()


def summary_of(attempt: Any) -> dict[str, Any]:
    """One attempt as it stands."""
    machine = attempt.machine
    return {
        "way": "received" if isinstance(attempt, ReceiverAttempt) else "sent",
        "fetch": machine.plan.job.fetch,
        "peer": machine.plan.peer,
        "state": machine.state.value,
        "blocks": held_by(attempt),
    }


class Watch:
    """Answers about one worker."""

    def __init__(self, fabric: Fabric, plan: FabricPlan, ledger: Ledger) -> None:
        self._fabric = fabric
        self._plan = plan
        self._ledger = ledger

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until who asks hangs up."""
        while line := await reader.readline():
            request = json.loads(line)
            self._ledger.freezes = request["freeze"]
            state = await self._look(request["since"], audit=request["audit"])
            writer.write(json.dumps(state).encode() + b"\n")
        writer.close()

    async def _look(self, since: int, *, audit: bool) -> dict[str, Any]:
        sent, received = self._fabric.sender_hub._attempts, self._fabric.receiver_hub._attempts
        attempts = [summary_of(attempt) for attempt in (*sent.values(), *received.values())]
        owners = {RequestId(transfer_id) for transfer_id in sent}

        def engine(scheduler: Scheduler) -> dict[str, int]:
            if audit:
                scheduler.check_invariants()
                blocks = scheduler.blocks
                suspects = [block for attempt in received.values() for block in in_quarantine(attempt)]
                if any(blocks.pool.num_refs(block) != 1 or blocks.index.holds(block) for block in suspects):
                    raise InvariantError("somebody else has a block in quarantine")
            load = scheduler.load()
            return {
                "used": load.num_used_blocks,
                "promised": load.num_promised_blocks,
                "reservations": load.num_reservations,
                "quarantined": load.num_quarantined_blocks,
                "unowned_pins": len(scheduler.blocks._pins.keys() - owners),
            }

        return {
            "pid": os.getpid(),
            "incarnation": self._plan.identity.incarnation,
            "attempts": attempts,
            "ends": self._ledger.ends[since:],
            "num_ends": len(self._ledger.ends),
            "num_quarantined": self._ledger.num_quarantined,
            "engine": await self._plan.host.call(engine),
        }


def watch(module: ModuleType, path: Path) -> None:
    """Let the worker whose `serve` is in `module` answer at `path` once it has its fabric."""
    opened = module.open_fabric
    ledger = Ledger()
    ledger.observe()
    path.unlink(missing_ok=True)  # of the worker that was here before

    async def open_watched(stack: AsyncExitStack, server: Any, plan: FabricPlan) -> Fabric:
        fabric = await opened(stack, server, plan)
        answers = await asyncio.start_unix_server(Watch(fabric, plan, ledger).answer, path)
        stack.callback(answers.close)
        return fabric

    module.open_fabric = open_watched  # type: ignore[attr-defined]
