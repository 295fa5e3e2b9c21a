"""A disk in memory that works only when told to, and may fail: implements `engine.kv_cache.tiers.disk_index.DiskPort`.

What it copies it copies when it works, so that a place that was given to somebody else too soon shows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.tiers.disk_index import DiskDone, DiskJob, DiskVerdict
from tandem.values.ids import BlockHash

BLOCK_BYTES = 100


@dataclass(slots=True, kw_only=True)
class SlowDisk:
    """Files as lists of numbers; writes and deletions in order, reads before them."""

    host: dict[int, list[int | None]]
    """The runner's places."""
    capacity: int
    files: dict[BlockHash, list[int | None]] = field(default_factory=dict)
    damaged: set[BlockHash] = field(default_factory=set)
    is_full: bool = False
    writes: deque[Callable[[], None]] = field(default_factory=deque)
    reads: deque[Callable[[], None]] = field(default_factory=deque)
    done: list[DiskDone] = field(default_factory=list)

    def write(self, name: BlockHash, slot: int) -> None:
        self.writes.append(lambda: self._write(name, slot))

    def read(self, name: BlockHash, slot: int) -> None:
        self.reads.append(lambda: self._read(name, slot))

    def delete(self, name: BlockHash) -> None:
        self.writes.append(lambda: self._delete(name))

    def collect(self) -> Sequence[DiskDone]:
        done, self.done = self.done, []
        return done

    def work(self, num_jobs: int = 1_000_000) -> None:
        while num_jobs and (self.reads or self.writes):
            (self.reads or self.writes).popleft()()
            num_jobs -= 1

    def _write(self, name: BlockHash, slot: int) -> None:
        verdict = DiskVerdict.FAILED if self.is_full else DiskVerdict.DONE
        if not self.is_full:
            self.files[name] = list(self.host[slot])
            assert len(self.files) <= self.capacity, "more on disk than there may be"
        self._end(DiskJob.WRITE, name, slot, verdict)

    def _read(self, name: BlockHash, slot: int) -> None:
        content = self.files.get(name)
        self.host[slot] = [-7] * 16  # whatever comes of it, the place is not what it was
        if content is None:
            self._end(DiskJob.READ, name, slot, DiskVerdict.GONE)
        elif name in self.damaged:
            self._end(DiskJob.READ, name, slot, DiskVerdict.DAMAGED)
        else:
            self.host[slot] = list(content)
            self._end(DiskJob.READ, name, slot, DiskVerdict.DONE)

    def _delete(self, name: BlockHash) -> None:
        self.files.pop(name, None)
        self.damaged.discard(name)

    def _end(self, job: DiskJob, name: BlockHash, slot: int, verdict: DiskVerdict) -> None:
        num_bytes = BLOCK_BYTES if verdict is DiskVerdict.DONE else 0
        self.done.append(
            DiskDone(job=job, name=name, slot=slot, verdict=verdict, num_bytes=num_bytes, seconds=1e-9 * num_bytes)
        )
