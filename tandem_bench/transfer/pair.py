"""One contestant's two processes: started, connected, given cases, run, and frozen while others use the machine."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem_bench.peers.process import EngineProcess, EngineProcessFailed, Launch
from tandem_bench.transfer.cases import Case
from tandem_bench.transfer.contestants import Contestant
from tandem_bench.transfer.pools import Pools

_START_S = 120.0
_CALL_S = 60.0
END_HOST = Path(__file__).parent / "end_host.py"
ENDS = END_HOST.parent / "ends"


class Pair:
    """Sender and receiver: `start`, `prepare` each case, then `run`, then `stop`. All raise EngineProcessFailed."""

    def __init__(self, contestant: Contestant, pools: Pools) -> None:
        self.name = contestant.name
        self._sender = EngineProcess(_launch(contestant, "Sender", pools))
        self._receiver = None if contestant.is_alone else EngineProcess(_launch(contestant, "Receiver", pools))

    async def start(self) -> Mapping[str, Any]:
        """Start and connect both; return the sender's description of itself."""
        ends = self._ends()
        await asyncio.gather(*(end.spawn() for end in ends))
        started = await asyncio.gather(*(end.ready() for end in ends))
        address = await _call(self._receiver, "open") if self._receiver else None
        await asyncio.gather(*(_call(end, "connect", address=address) for end in ends))
        return started[0].about

    async def prepare(self, case: Case) -> None:
        """Do what is done once per case: grants, registrations, descriptors."""
        message = case.message()
        ticket = await _call(self._receiver, "prepare", case=message, ticket=None) if self._receiver else None
        await _call(self._sender, "prepare", case=message, ticket=ticket)

    async def run(self, case: Case) -> float:
        """Return the seconds of one transfer of a prepared case, by the sender's clock."""
        seconds, *_ = await asyncio.gather(*(_call(end, "run", name=case.name) for end in self._ends()))
        if not isinstance(seconds, float) or seconds <= 0:
            raise EngineProcessFailed(f"{self.name}: a transfer took {seconds!r} s")
        return seconds

    def cpu_s(self) -> tuple[float, float]:
        """Return CPU time of the sender and of the receiver since they started."""
        sender, *receiver = (_cpu_s(end.pid) for end in self._ends())
        return sender, sum(receiver)

    def freeze(self) -> None:
        """Stop both processes temporarily: libraries poll even when there is nothing to move."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let both processes run again."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End both at once, whatever their state: they hold nothing that must be saved."""
        self._signal(signal.SIGKILL)
        await asyncio.gather(*(end.stop() for end in self._ends()))

    def _ends(self) -> list[EngineProcess]:
        return [self._sender, *([self._receiver] if self._receiver else [])]

    def _signal(self, number: signal.Signals) -> None:
        for end in self._ends():
            with suppress(EngineProcessFailed, ProcessLookupError):
                os.kill(end.pid, number)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of the live threads: all that move data live as long as their process."""
    return sum(_thread_cpu_s(file) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def _thread_cpu_s(file: Path) -> float:
    """Read CPU time in nanoseconds, where getrusage counts in ticks; see proc(5)."""
    try:
        return int(file.read_text(encoding="ascii").split()[0]) / 1e9
    except FileNotFoundError:  # it has just ended
        return 0.0


async def _call(end: EngineProcess, method: str, **arguments: Any) -> Any:
    return (await end.run({"do": method, "with": arguments}))["result"]


def _launch(contestant: Contestant, end: str, pools: Pools) -> Launch:
    paths = pools.paths()
    wanted = paths if contestant.is_alone else {key: paths[key] for key in ("source" if end == "Sender" else "target",)}
    return Launch(
        name=f"{contestant.name} {end.lower()}",
        python=contestant.python,
        adapter=str(contestant.file),
        options={"class": end, "pools": wanted, "pool_bytes": pools.size_bytes, **contestant.options},
        environment=contestant.environment,
        host=END_HOST,
        start_timeout_s=_START_S,
        job_timeout_s=_CALL_S,
    )
