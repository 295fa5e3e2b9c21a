"""Index of the blocks that a disk holds or is writing: names in order of use, up to a capacity.

The I/O (`engine.kv_storage.disk_store`) is called through a Protocol and reports when it is done: nothing waits for it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem.errors import InvariantError
from tandem.values.ids import BlockHash


class DiskJob(Enum):
    """Kind of a disk operation."""

    WRITE = "write"
    READ = "read"


class DiskVerdict(Enum):
    """Result of a disk operation."""

    DONE = "done"
    FAILED = "failed"
    """The system refused: no space, no permission, no device."""
    DAMAGED = "damaged"
    """The bytes read are not those written, or belong to another cache."""
    GONE = "gone"
    """The file no longer exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskDone:
    """The end of one disk operation."""

    job: DiskJob
    name: BlockHash
    slot: int
    verdict: DiskVerdict
    num_bytes: int
    seconds: float


class DiskPort(Protocol):
    """Block files, written from and read into places in host memory; no call waits.

    Writes and deletions are carried out in the order of the calls, reads at any time. A place belongs
    to the disk from the call to its `DiskDone`.
    """

    def write(self, name: BlockHash, slot: int) -> None:
        """Write the content of a place to a file."""
        ...

    def read(self, name: BlockHash, slot: int) -> None:
        """Read a file into a place, and verify it."""
        ...

    def delete(self, name: BlockHash) -> None:
        """Remove a file, if it exists; no `DiskDone` follows."""
        ...

    def collect(self) -> Sequence[DiskDone]:
        """Operations that have ended since the last call."""
        ...


class DiskIndex:
    """Names on disk and those being written, together never more than `capacity`."""

    __slots__ = ("_stored", "_writing", "capacity")

    def __init__(self, capacity: int, names: Sequence[BlockHash] = ()) -> None:
        """`names`: names left by an earlier process, least recently used first; at most `capacity`."""
        self.capacity = capacity
        self._stored: OrderedDict[BlockHash, None] = OrderedDict.fromkeys(names)
        self._writing: set[BlockHash] = set()
        self.check_invariants()

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_writing(self) -> int:
        """Number of blocks being written."""
        return len(self._writing)

    def begin(self, name: BlockHash) -> list[BlockHash] | None:
        """Begin a write. Returns the names to delete before it, least recently used first.

        None when it is being written already, or when all the room is taken by writes.
        """
        if name in self._writing or len(self._writing) >= self.capacity:
            return None
        gone: list[BlockHash] = []
        while len(self._stored) + len(self._writing) >= self.capacity:
            gone.append(self._stored.popitem(last=False)[0])
        self._writing.add(name)
        return gone

    def end(self, name: BlockHash, *, is_stored: bool) -> None:
        """End a write; a stored block becomes the most recently used."""
        if name not in self._writing:
            raise InvariantError("the end of a write that was not begun")
        self._writing.remove(name)
        if is_stored:
            self._stored[name] = None

    def touch(self, name: BlockHash) -> None:
        """Mark `name` as the most recently used."""
        if name in self._stored:
            self._stored.move_to_end(name)

    def forget(self, name: BlockHash) -> bool:
        """Remove a name; False when it was not stored."""
        if name not in self._stored:
            return False
        del self._stored[name]
        return True

    def check_invariants(self) -> None:
        """Raise InvariantError when the capacity is exceeded."""
        if len(self._stored) + len(self._writing) > self.capacity or self._writing & self._stored.keys():
            raise InvariantError(
                f"{len(self._stored)} blocks on disk, {len(self._writing)} coming, {self.capacity} fit"
            )
