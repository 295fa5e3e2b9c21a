"""Memory of a process tree, and its private share as opposed to file pages."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssShmem")
_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Peak memory of a process and its children so far, in bytes."""

    peak_bytes: int
    """All resident memory including file pages (VmHWM): what counts against a container's limit at worst."""
    private_bytes: int
    """Memory that cannot be dropped and read again: RssAnon + RssShmem."""

    def joined(self, other: "Footprint") -> "Footprint":
        """Return the larger of each figure."""
        return Footprint(
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            private_bytes=max(self.private_bytes, other.private_bytes),
        )


NOTHING = Footprint(peak_bytes=0, private_bytes=0)


def family(pid: int) -> tuple[int, ...]:
    """Return a process and all its children; none when it has ended. Scans every process of the machine."""
    with suppress(psutil.NoSuchProcess):
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    return ()


def footprint(pids: Iterable[int]) -> Footprint:
    """Sum the present memory of some processes; those that have ended count nothing."""
    statuses = [parse_status(text) for text in _statuses(pids)]
    return Footprint(
        # A program may reset its own peak (proc(5), clear_refs): present resident memory counts in any case.
        peak_bytes=sum(max(status["VmHWM"], status["VmRSS"]) for status in statuses),
        private_bytes=sum(status["RssAnon"] + status["RssShmem"] for status in statuses),
    )


def parse_status(text: str) -> Mapping[str, int]:
    """Parse the memory lines of /proc/PID/status, in bytes; absent ones are zero."""
    found = dict(re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE))
    return {name: int(found.get(name, 0)) * 1024 for name in _FIELDS}


def _statuses(pids: Iterable[int]) -> list[str]:
    texts = []
    for pid in pids:
        with suppress(OSError):
            texts.append(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return texts


class Watch:
    """Largest footprint sampled during a context."""

    def __init__(self) -> None:
        self.peak = NOTHING

    def sample(self, pids: Iterable[int]) -> None:
        self.peak = self.peak.joined(footprint(pids))

    @asynccontextmanager
    async def over(self, pid: int) -> AsyncIterator[None]:
        """Sample a process and its present children until the end of the context.

        A peak between two samples appears in VmHWM only. Sampling is cheap because it runs during the measurement:
        later children are found once, at the end.
        """
        task = asyncio.create_task(self._watch(family(pid)))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.sample(family(pid))

    async def _watch(self, pids: tuple[int, ...]) -> None:
        while True:
            self.sample(pids)
            # The kernel has no event for memory usage: sampling is the only way.
            await asyncio.sleep(_PERIOD_S)
