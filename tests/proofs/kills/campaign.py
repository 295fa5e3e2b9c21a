"""Kills workers at random moments while clients ask, and looks at what becomes of the blocks that they leave behind."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster.supervisor.supervisor import RestartPolicy
from kv_transfer.protocol.leases import LeaseClock
from tests.proofs.kills.clients import RIGHT, Clients, Prompt
from tests.support.running_cluster import RunningCluster

PATIENT = RestartPolicy(max_rapid_deaths=1_000_000, max_backoff_s=0.05, backoff_s=0.05)
"""A supervisor that restarts whatever dies, at once and for ever."""
SHAPE: dict[str, Any] = {
    "prefill__replicas": 2,
    "decode__replicas": 2,
    # Prompts of many chunks, in pools small enough that blocks are soon used again.
    "engine__prefill_chunk_tokens": 16,
    "engine__max_batched_tokens": 64,
    "engine__num_blocks": 300,
    # Hand-offs are to wait at the workers that are killed.
    "router__queue__worker_backlog_s": 60.0,
    # On a slow and busy machine they wait, and are not refused.
    "router__max_queue_s": 600.0,
}


RANKS_HELP = "ranks of each prefill and decode worker, which have their KV for themselves; default: 1:1"


def sizes_of(text: str) -> tuple[int, int]:
    """Read `P:D`. Raises ValueError."""
    prefill, decode = map(int, text.split(":"))
    return prefill, decode


def private_ranks(prefill: int, decode: int) -> dict[str, Any]:
    """Return settings of workers of so many ranks, each with KV that nobody else can map."""
    return {
        "engine__kv_memory": "private",
        "prefill__tensor_parallel_size": prefill,
        "decode__tensor_parallel_size": decode,
    }


NUM_CLIENTS = 6
FREE_WITHIN_S = 2.0
_GIVE_UP_S = 10.0
_POLL_S = 0.005
_MAX_STEP_S = 0.5
_LONGEST_PAUSE_S = 0.5
_EXITED = "exited with code"
_WRONG = ("Traceback", "CRITICAL", _EXITED)
_WITHOUT_RANK = ("this worker cannot go on without it", "the engine failed: RankLost")
"""Either the thread that watches the rank notices first, or the engine, whose step needed it and ends the process."""
_RAISED = re.compile(r"[\w-]+:[ |+]*(?:[\w]+\.)*(\w+): ")
"""The last line of a traceback, of an exception of this class."""
_OF_A_LOST_RANK = frozenset({"RankLost", "ExceptionGroup", "BaseExceptionGroup"})
_MOST_REASONS = 80
"""Lines of one process that are shown where its end was not expected."""
_WAITS_FOR_RETURN = 0.7
"""Share of the kills after which nothing else is killed until the victim is back."""
WITHIN = ("reserved", "streaming", "sealed")
"""A transfer is under way: destinations are granted, nothing is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and what the others saw of it."""

    victim: str
    hits: Sequence[dict[str, Any]]
    """Attempts with the victim that were under way, as its peers saw them end."""
    free_s: float
    """From the kill until every peer had given back all that it held for the victim."""

    @property
    def role(self) -> str:
        return self.victim.partition("-")[0]

    @property
    def num_blocks(self) -> int:
        """Held for the victim when its peers learnt of its end."""
        return sum(hit["blocks"] for hit in self.hits)


@dataclass(slots=True)
class Report:
    """What a campaign came to."""

    kills: list[Kill] = field(default_factory=list)
    """Within a transfer."""
    num_ranks_killed: int = 0
    """Of all kills, those of a rank other than the first."""
    num_missed: int = 0
    """Kills outside of every transfer."""
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Workers:
    """A cluster's workers, as they show themselves in `folder` (see `tests.proofs.kills.watched`)."""

    def __init__(self, cluster: RunningCluster, folder: Path) -> None:
        self.cluster = cluster
        self.names = [view.name for view in cluster.local.workers]
        self._folder = folder

    async def look(self, name: str, *, since: int = 0, audit: bool = False, freeze: bool = False) -> dict[str, Any]:
        """One worker now; `freeze`: from now on, until asked otherwise, it stops as soon as blocks of a fetch move.

        Raises OSError or EOFError when it has died.
        """
        reader, writer = await asyncio.open_unix_connection(self._folder / f"{name}.sock", limit=1 << 24)
        try:
            writer.write(json.dumps({"since": since, "audit": audit, "freeze": freeze}).encode() + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise EOFError(f"{name} does not answer")
        return json.loads(line)

    async def settle(self, name: str, stopped: Mapping[str, Any]) -> None:
        """Wait until all that a stopped worker has sent is read, and its peers' attempts with it no longer change.

        `stopped`: its state before, by `look`.
        """

        async def is_read() -> bool:
            return not unread_bytes(stopped["pid"])

        async def attempts() -> list[Any]:
            states = [await self.look(peer) for peer in self.names if peer != name]
            return [a for state in states for a in state["attempts"] if a["peer"] == stopped["incarnation"]]

        await self.cluster.until(is_read)
        before = await attempts()
        while (after := await attempts()) != before:
            before = after

    async def come_back(self, name: str, old_pid: int | None) -> None:
        """Wait until a killed worker serves again and a router has it. `old_pid`: by the supervisor."""
        await self.cluster.local.wait_ready(name, after_pid=old_pid)
        await self.cluster.until(lambda: self.is_here(name))

    async def is_here(self, name: str) -> bool:
        """Whether a router has it."""
        return any(name in key for key in await self.cluster.figures("tandem_worker_kv_blocks", state="used"))

    async def leftovers(self) -> list[str]:
        """What idle workers still hold, after an audit of every block."""
        found = []
        for name in self.names:
            state = await self.look(name, audit=True)
            found += [f"{name} has attempt {attempt}" for attempt in state["attempts"]]
            found += [f"{name} has {count} {what}" for what, count in state["engine"].items() if count]
        return found


def rank_pids(pid: int) -> list[int]:
    """Return the processes of a worker's other ranks."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "worker.rank" in one.cmdline():
                    found.append(one.pid)
    return found


def unread_bytes(pid: int) -> int:
    """Bytes that a process has sent over TCP on this machine and that nobody has read yet."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it has just been closed
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if (path := Path(f"/proc/{pid}/net/{table}")).exists()
        for line in path.read_text().splitlines()[1:]
    ]
    received = {(row[1], row[2]): int(row[4].partition(":")[2], 16) for row in rows}
    return sum(
        int(row[4].partition(":")[0], 16) + received.get((row[2], row[1]), 0) for row in rows if row[9] in inodes
    )


class Campaign:
    """Kills until enough of them have hit a transfer."""

    def __init__(
        self, workers: Workers, prompts: Sequence[Prompt], *, seed: int, num_clients: int = NUM_CLIENTS
    ) -> None:
        self._num_clients = num_clients
        self.report = Report()
        self._workers = workers
        self._first_line = len(workers.cluster.logs.lines)
        self._whole_s = 0.0
        """Time in which all workers were there. On a slow machine those that die one after the other may leave nobody
        to answer for a minute; a request that hangs, hangs for ever."""
        self._clients = Clients(workers.cluster, prompts, seed=seed, clock=self._now, patience=lambda: self._whole_s)
        self._draw = random.Random(seed)
        self._clock = LeaseClock(time.monotonic(), max_step_s=_MAX_STEP_S)
        self._excused: list[int] = []
        """Lines of the log, between the kill of a rank and its worker's return."""
        self._away: set[str] = set()
        self._returns: set[asyncio.Task[None]] = set()

    async def run(self, count: int) -> Report:
        """`count` kills within transfers; leaves an idle cluster."""
        report, started_s = self.report, self._now()
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick())
            async with self._clients.asking(self._num_clients):
                await self._workers.cluster.until(self._is_loaded)
                while len(report.kills) < count and not (report.problems or self._clients.problems):
                    await self._kill_one(tasks)
                    # Or a slow machine's cluster would be killed faster than it can answer, and nothing be shown.
                    await self._workers.cluster.until(self._has_kept_up)
            await asyncio.gather(*self._returns)
            await self._workers.cluster.until_idle()
            ticking.cancel()
        report.seconds = self._now() - started_s
        report.outcomes, report.slowest_s = self._clients.outcomes, self._clients.slowest_s
        report.problems += self._clients.problems
        report.problems += await self._workers.leftovers()
        report.problems += self._unexpected_exits(len(report.kills) + report.num_missed)
        return report

    async def _is_loaded(self) -> bool:
        """Whether requests run, and the first of them have ended one way or another."""
        return bool(self._clients.outcomes or self._clients.problems)

    async def _has_kept_up(self) -> bool:
        """Whether there are more right answers than kills."""
        return self._clients.outcomes[RIGHT] > len(self.report.kills) or bool(self._clients.problems)

    async def _tick(self) -> None:
        ticked_s = self._now()
        while True:
            self._clock.tick(time.monotonic())
            now_s = self._now()
            self._whole_s += 0.0 if self._away else now_s - ticked_s
            ticked_s = now_s
            await asyncio.sleep(_MAX_STEP_S / 10)

    def _now(self) -> float:
        """Seconds in which this process was not stopped: what stops it stops its cluster too."""
        return self._clock.read(time.monotonic())

    async def _kill_one(self, tasks: asyncio.TaskGroup) -> None:
        workers, draw = self._workers, self._draw
        here = [name for name in workers.names if name not in self._away]
        role = draw.choice(sorted({name.partition("-")[0] for name in here}))
        victim = draw.choice([name for name in here if name.startswith(role)])
        states = {name: await workers.look(name) for name in here}
        await asyncio.sleep(draw.uniform(0.0, _LONGEST_PAUSE_S))
        old_pid = workers.cluster.pid(victim)
        pid = draw.choice([states[victim]["pid"], *rank_pids(states[victim]["pid"])])
        killed_s, killed_at_s = self._now(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._away.add(victim)
        task = tasks.create_task(self._return(victim, old_pid, is_rank=pid != states[victim]["pid"]))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)
        peers = [name for name in here if name != victim]
        dead = states[victim]["incarnation"]
        seen = await asyncio.gather(*(self._freed(name, dead, states[name]["num_ends"], killed_s) for name in peers))
        # Under way when the peer learnt of the end, not ended before for another reason.
        hits = [e for _, ends in seen for e in ends if e["state"] in WITHIN and e["at_s"] >= killed_at_s]
        free_s = max((seconds for seconds, _ in seen), default=0.0)
        if free_s > FREE_WITHIN_S:
            self.report.problems.append(f"blocks of {victim} were held for {free_s:.2f} s")
        if hits:
            self.report.kills.append(Kill(victim=victim, hits=hits, free_s=free_s))
        else:
            self.report.num_missed += 1
        if draw.random() < _WAITS_FOR_RETURN:
            await task
        if len(self._away) == len(workers.names):
            await asyncio.wait(self._returns, return_when=asyncio.FIRST_COMPLETED)

    async def _return(self, name: str, old_pid: int | None, *, is_rank: bool) -> None:
        lines = self._workers.cluster.logs.lines
        first = len(lines)
        await self._workers.come_back(name, old_pid)
        self._away.discard(name)
        if is_rank:
            self.report.num_ranks_killed += 1
            self._excuse(name, first)

    def _excuse(self, name: str, first: int) -> None:
        """Expect that a worker says, from line `first` on, why it cannot go on without a rank, and ends: that alone."""
        lines = self._workers.cluster.logs.lines
        own = [at for at in range(first, len(lines)) if lines[at].startswith(f"{name}:")]
        end = next((nth for nth, at in enumerate(own) if _EXITED in lines[at]), len(own))
        own = own[: end + 1]
        raised = {found[1] for at in own if (found := _RAISED.match(lines[at]))}
        if any(sign in lines[at] for at in own for sign in _WITHOUT_RANK) and raised <= _OF_A_LOST_RANK:
            self._excused += own
        else:
            self.report.problems.append(f"{name} lost a rank and raised {sorted(raised)}:")
            self.report.problems += [lines[at] for at in own]

    async def _freed(self, name: str, dead: int, since: int, killed_s: float) -> tuple[float, list[dict[str, Any]]]:
        """When a peer held nothing more for a dead worker, in seconds from the kill; what it had under way with it."""
        while True:
            state = await self._workers.look(name, since=since)
            engine, after_s = state["engine"], self._now() - killed_s
            held = any(attempt["peer"] == dead and attempt["blocks"] for attempt in state["attempts"])
            if not (held or engine["quarantined"] or engine["unowned_pins"]) or after_s > _GIVE_UP_S:
                return after_s, [end for end in state["ends"] if end["peer"] == dead]
            await asyncio.sleep(_POLL_S)

    @staticmethod
    def _with_reasons(lines: Mapping[int, str], unexpected: set[int]) -> list[int]:
        """Lines that nothing explains, and what the same process said between them: the reason has no word of these."""
        by_process: dict[str, list[int]] = {}
        for at in sorted(unexpected):
            by_process.setdefault(lines[at].partition(":")[0], []).append(at)
        found = set(unexpected)
        for name, own in by_process.items():
            between = [at for at in range(own[0], own[-1] + 1) if at in lines and lines[at].startswith(f"{name}:")]
            found.update(between[-_MOST_REASONS:])
        return sorted(found)

    def _unexpected_exits(self, num_kills: int) -> list[str]:
        logged = self._workers.cluster.logs.lines
        lines = {at: line for at, line in enumerate(logged) if at >= self._first_line}
        wrong = {at for at, line in lines.items() if any(word in line for word in _WRONG)}
        found = [lines[at] for at in self._with_reasons(lines, wrong - set(self._excused))]
        num_ended = sum("was ended by SIGKILL; restart" in line for line in lines.values())
        num_lost = sum(_EXITED in lines[at] for at in wrong & set(self._excused))
        if (num_ended, num_lost) != (num_kills - self.report.num_ranks_killed, self.report.num_ranks_killed):
            found.append(
                f"{num_ended} workers were ended by a kill and {num_lost} for want of a rank; "
                f"{num_kills} kills, {self.report.num_ranks_killed} of ranks"
            )
        return found
