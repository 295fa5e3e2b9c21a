"""Batch after batch until enough hand-offs were hit, then a table. Threads and descriptors must not stay either."""

import asyncio
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from tests.proofs.faults.batch import Batch, BatchReport
from tests.proofs.faults.ends import Ends
from tests.proofs.faults.impatience import impatient
from tests.proofs.faults.plan import Focus, Kind, plan_batch

OUTCOMES = ("committed", "committed after a retry", "cancelled", "failed cleanly")
_AT_A_TIME = 20
"""Batches: most of the time each waits for something that is stalled or lost."""
_FEWEST = 4
"""Hand-offs of a batch that are hit, more or less."""
_MAX_LOOKS = 200
Descriptor = tuple[str, int]
"""What it is, and its inode."""
_FILES = "anon_inode"
"""Event loops' own."""
_FILES_OF_GLOO = "anon_inode|pipe"
"""A process group that broke while it was made keeps the store where it was to meet, which is one for each receiver."""
_LASTING = ("asyncio_", "MainThread", "pytest", "ThreadPoolExecutor", "Dummy")


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """What became of all hand-offs of a campaign."""

    transfers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (transport, outcome)."""
    faults: Counter[tuple[str, Kind, str]] = field(default_factory=Counter)
    """By (transport, kind, outcome): hand-offs that had it; one with two kinds counts in both."""
    violations: list[str] = field(default_factory=list)
    num_undisturbed: int = 0
    num_quarantined: int = 0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Hand-offs that were hit."""
        return self.transfers.total()

    def add(self, transport: str, seed: int, report: BatchReport) -> None:
        """Count what one batch reports."""
        for ended in report.ended:
            self.transfers[transport, ended.outcome] += 1
            for kind in {kind for kind, _place in ended.faults}:
                self.faults[transport, kind, ended.outcome] += 1
        self.num_undisturbed += report.num_undisturbed
        self.num_quarantined += report.num_quarantined
        self.violations += [f"{transport} {seed}: {violation}" for violation in report.violations]

    def merge(self, other: "CampaignReport") -> None:
        """Add the counts of another campaign."""
        self.transfers += other.transfers
        self.faults += other.faults
        self.violations += other.violations
        self.num_undisturbed += other.num_undisturbed
        self.num_quarantined += other.num_quarantined
        self.seconds += other.seconds

    def table(self) -> str:
        """Transport x kind of fault x outcome."""
        lines = [f"{'':12}{'':10}" + "".join(f"{outcome:>25}" for outcome in OUTCOMES)]
        for transport in dict.fromkeys(name for name, _ in self.transfers):
            for kind in Kind:
                if any(self.faults[transport, kind, outcome] for outcome in OUTCOMES):
                    lines.append(_row(transport, kind, (self.faults[transport, kind, o] for o in OUTCOMES)))
            lines.append(_row(transport, "all", (self.transfers[transport, o] for o in OUTCOMES)))
        lines.append(
            f"{self.count:,} hand-offs were hit ({self.num_undisturbed:,} more were not and do not count); "
            f"{self.num_quarantined:,} blocks were quarantined for a time; {self.seconds:.1f} s; "
            f"{len(self.violations)} violations"
        )
        return "\n".join(lines)


def _row(transport: str, kind: str, counts: Iterable[int]) -> str:
    return f"{transport:12}{kind:10}" + "".join(f"{count:>25,}" for count in counts)


def campaign(transport: str, *, count: int, seed: int, focus: Focus | None = None) -> CampaignReport:
    """Until `count` hand-offs were hit, or something was wrong."""
    tally, started_s = CampaignReport(), time.monotonic()
    with impatient(), Ends() as ends:
        asyncio.run(_campaign(transport, count, seed, focus, ends, tally))
    tally.seconds = time.monotonic() - started_s
    return tally


def check_campaign(transport: str, *, count: int, seed: int) -> None:
    """Run a campaign, print its table, and assert that nothing was wrong and every kind of fault was tried."""
    report = campaign(transport, count=count, seed=seed)
    print(report.table())
    how = "replay with: python -m tests.proofs.faults --transport NAME --replay SEED"
    assert not report.violations, "\n".join((*report.violations, how))
    assert report.count >= count
    assert {kind for _transport, kind, _outcome in report.faults} == set(Kind)
    assert sum(n for (_, outcome), n in report.transfers.items() if outcome.startswith("committed")) > count / 2


def replay(transport: str, seed: int, only: int | None, focus: Focus | None = None) -> CampaignReport:
    """One batch again, or one hand-off of it alone."""
    tally, started_s = CampaignReport(), time.monotonic()
    with impatient(), Ends() as ends:
        asyncio.run(_watched([(seed, Batch(plan_batch(transport, seed, focus), ends, only))], transport, tally))
    tally.seconds = time.monotonic() - started_s
    return tally


async def _campaign(
    transport: str, count: int, seed: int, focus: Focus | None, ends: Ends, tally: CampaignReport
) -> None:
    following = seed
    while tally.count < count and not tally.violations:
        num_batches = max(1, min(_AT_A_TIME, (count - tally.count) // _FEWEST))
        seeds = range(following, following + num_batches)
        following += num_batches
        batches = [(one, Batch(plan_batch(transport, one, focus), ends)) for one in seeds]
        await _watched(batches, transport, tally)


async def _watched(batches: list[tuple[int, Batch]], transport: str, tally: CampaignReport) -> None:
    """Run them at once; an exception that nothing else reports is a violation, and so is what stays behind."""
    # As long as some channel is open gRPC keeps one thread and its socket.
    async with grpc.aio.insecure_channel("127.0.0.1:1"):
        await _watch(batches, transport, tally)


async def _watch(batches: list[tuple[int, Batch]], transport: str, tally: CampaignReport) -> None:
    loop = asyncio.get_running_loop()
    # The workers of many batches connect and hang up on this loop's threads, which are few by default.
    loop.set_default_executor(ThreadPoolExecutor(64))
    threads, descriptors = set(threading.enumerate()), _descriptors()
    unreported: list[str] = []

    def from_loop(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC polls for all loops of a process on one of them: this one hears of a call that ended on another, closed
        # one, of an earlier test. This loop is open as long as it is asked, so it cannot be meant.
        if str(context.get("exception")) != "Event loop is closed":
            unreported.append(f"nobody caught {context.get('exception')!r}: {context['message']}")

    def from_thread(args: threading.ExceptHookArgs) -> None:
        unreported.append(f"a thread ended in {args.exc_value!r}")

    hook, threading.excepthook = threading.excepthook, from_thread
    loop.set_exception_handler(from_loop)
    try:
        reports = await asyncio.gather(*(batch.run() for _seed, batch in batches))
        files = _FILES_OF_GLOO if transport == "torch_dist" else _FILES
        unreported += await _left_behind(threads, descriptors, files)
    finally:
        threading.excepthook = hook
        loop.set_exception_handler(None)
    for (seed, _batch), report in zip(batches, reports, strict=True):
        tally.add(transport, seed, report)
    seeds = f"{batches[0][0]} to {batches[-1][0]}"
    tally.violations += [f"{transport} {seeds}: {what}" for what in unreported]


async def _left_behind(threads: set[threading.Thread], descriptors: dict[int, Descriptor], files: str) -> list[str]:
    """What has not gone after a while: gRPC gives some descriptors back a little later.

    `files`: a pattern of what may stay.
    """
    left: list[str] = []
    for _ in range(_MAX_LOOKS):
        gc.collect()  # a mapping of a peer's pool keeps its descriptor until nobody can look at it
        left = [t.name for t in threading.enumerate() if t not in threads and not t.name.startswith(_LASTING)]
        opened = [seen for fd, seen in _descriptors().items() if descriptors.get(fd) != seen]
        left += [name for name, _inode in opened if not re.match(files, name)]
        if not left:
            return []
        await asyncio.sleep(0.02)  # nothing tells when a descriptor of gRPC's goes
    return [f"threads or descriptors are left: {left}"]


def _descriptors() -> dict[int, Descriptor]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name)).st_ino
    return found
