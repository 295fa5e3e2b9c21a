"""Which worker holds which prefix: block name -> bit set of workers, in memory, without any network.

Workers' events are the authority (`apply`). Between a dispatch and its events, blocks that a worker is about to
compute stand as *expected* (`expect`): a stored event confirms them, an evicted one, `revoke` or time ends them. A
worker's entries never exceed its real capacity, so the map is bounded by the cluster's KV memory; dropping a worker
costs its own blocks only. A wrong entry can only mean that tokens get computed.

After a gap in a worker's numbering its entries are dropped; what is learnt later is true but incomplete, so the
worker counts as *approximate* until its next snapshot.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.worker_view import PrefixChange
from tandem.ids import BlockHash, WorkerId


class _Expected(NamedTuple):
    """A block that is about to be computed."""

    lapses_s: float
    position: int
    """Of its last hash block in its prompt. Names are chained: in every prompt that has it, it is there."""


class _Holdings:
    """One worker's names: known ones oldest first, expected ones by the time they lapse."""

    __slots__ = ("bit", "capacity", "expected", "known", "names_per_block", "next_sequence", "synchronised")

    def __init__(self, bit: int, capacity: int, names_per_block: int) -> None:
        self.bit = bit
        self.capacity = capacity
        self.names_per_block = names_per_block
        self.known: OrderedDict[BlockHash, None] = OrderedDict()
        self.expected: OrderedDict[BlockHash, _Expected] = OrderedDict()
        self.next_sequence: int | None = None
        self.synchronised = False


class PrefixMap:
    """Names of blocks to the workers that hold them."""

    def __init__(self, *, expectation_s: float = 30.0) -> None:
        """An expected block that no event confirms within `expectation_s` is forgotten."""
        self._expectation_s = expectation_s
        self._holders: dict[BlockHash, int] = {}
        self._workers: dict[WorkerId, _Holdings] = {}
        self._by_bit: dict[int, WorkerId] = {}
        self._groups: dict[int, int] = {}
        """Bits of the workers by how many hash blocks one of their blocks holds."""

    def __len__(self) -> int:
        return len(self._holders)

    def add_worker(self, worker: WorkerId, *, capacity: int, names_per_block: int = 1) -> None:
        """Start to follow a worker whose pool has room for `capacity` blocks; forgets an earlier life of it.

        `names_per_block`: hash blocks in one of its blocks, which it knows by the last one's name.
        """
        self.drop_worker(worker)
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._by_bit[bit] = worker
        self._workers[worker] = _Holdings(bit, capacity, names_per_block)
        self._groups[names_per_block] = self._groups.get(names_per_block, 0) | bit

    def drop_worker(self, worker: WorkerId) -> None:
        """Forget a worker and its blocks; no-op for an unknown one."""
        if (held := self._workers.pop(worker, None)) is not None:
            self._forget_all(held)
            del self._by_bit[held.bit]
            self._groups[held.names_per_block] ^= held.bit

    def num_blocks(self, worker: WorkerId) -> int:
        """Blocks, known and expected, that the worker is thought to hold."""
        held = self._workers[worker]
        return len(held.known) + len(held.expected)

    def is_approximate(self, worker: WorkerId) -> bool:
        """Whether events were missed since the worker's last snapshot, or none came yet."""
        return not self._workers[worker].synchronised

    def apply(self, worker: WorkerId, change: PrefixChange) -> None:
        """Take in a worker's events; repeated ones are skipped, a gap drops what was known."""
        held = self._workers[worker]
        if change.snapshot:
            self._forget_all(held)
            held.next_sequence = change.first_sequence
            held.synchronised = True
            self._take(held, change.changes)
            return
        due = change.first_sequence if held.next_sequence is None else held.next_sequence
        if change.first_sequence > due:
            self._forget_all(held)
            held.synchronised = False
        held.next_sequence = max(due, change.first_sequence + len(change.changes))
        self._take(held, change.changes[max(0, due - change.first_sequence) :])

    def expect(self, worker: WorkerId, names: Sequence[BlockHash], *, now_s: float) -> None:
        """The prompt that the worker was just asked to compute, by the names of all its hash blocks."""
        held = self._workers.get(worker)
        if held is None:
            return
        lapses_s = now_s + self._expectation_s
        for index in range(held.names_per_block - 1, len(names), held.names_per_block):
            name = names[index]
            if name in held.known:
                held.known.move_to_end(name)
                continue
            held.expected[name] = _Expected(lapses_s, index)
            held.expected.move_to_end(name)
            self._holders[name] = self._holders.get(name, 0) | held.bit
            # The newest expectation gives way, not the oldest: a prefix is useful from its beginning.
            if len(held.known) + len(held.expected) > held.capacity:
                self._forget(held, name)
                return

    def revoke(self, worker: WorkerId, names: Iterable[BlockHash]) -> None:
        """The worker will not compute these after all; confirmed ones stay."""
        held = self._workers.get(worker)
        if held is None:
            return
        for name in names:
            if name in held.expected:
                self._forget(held, name)

    def expire(self, now_s: float) -> None:
        """End expectations that were never confirmed."""
        for held in self._workers.values():
            while held.expected:
                name, expected = next(iter(held.expected.items()))
                if expected.lapses_s > now_s:
                    break
                self._forget(held, name)

    def longest_prefix(self, names: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Leading hash blocks of `names` that each worker holds without a hole; workers with none are absent."""
        matched: dict[WorkerId, int] = {}
        for per_block, members in self._groups.items():
            if members:
                self._match(names[per_block - 1 :: per_block], members, per_block, matched)
        return matched

    def num_confirmed(self, worker: WorkerId, names: Sequence[BlockHash]) -> int:
        """Of leading hash blocks that the worker is thought to hold, those before the first that is only expected.

        In time of the shorter of the two: of `names`, and of what is expected.
        """
        held = self._workers[worker]
        per_block, length = held.names_per_block, len(names)
        if len(held.expected) * per_block < length:
            items = held.expected.items()
            first = min((i for name, (_, i) in items if i < length and names[i] == name), default=None)
        else:
            first = next((i for i in range(per_block - 1, length, per_block) if names[i] in held.expected), None)
        return length if first is None else first - (per_block - 1)

    def _match(self, names: Sequence[BlockHash], members: int, per_block: int, matched: dict[WorkerId, int]) -> None:
        """The same for workers with blocks of one size, by the names of such blocks."""
        find = self._holders.get
        alive = find(names[0], 0) & members if names else 0
        for depth, name in enumerate(names):
            left = alive & ~find(name, 0)
            if left:
                self._record(matched, left, depth * per_block)
                alive ^= left
                if not alive:
                    break
        self._record(matched, alive, len(names) * per_block)

    def _record(self, matched: dict[WorkerId, int], bits: int, num_names: int) -> None:
        while bits:
            bit = bits & -bits
            matched[self._by_bit[bit]] = num_names
            bits ^= bit

    def _take(self, held: _Holdings, changes: Iterable[tuple[BlockHash, bool]]) -> None:
        for name, stored in changes:
            if not stored:
                self._forget(held, name)
                continue
            held.expected.pop(name, None)
            held.known[name] = None
            held.known.move_to_end(name)
            self._holders[name] = self._holders.get(name, 0) | held.bit
            if len(held.known) + len(held.expected) > held.capacity:
                self._forget(held, next(iter(held.expected or held.known)))

    def _forget(self, held: _Holdings, name: BlockHash) -> None:
        if name in held.known:
            del held.known[name]
        elif name in held.expected:
            del held.expected[name]
        else:
            return
        self._unlist(name, held.bit)

    def _forget_all(self, held: _Holdings) -> None:
        for names in (held.known, held.expected):
            for name in names:
                self._unlist(name, held.bit)
        held.known.clear()
        held.expected.clear()

    def _unlist(self, name: BlockHash, bit: int) -> None:
        if left := self._holders[name] & ~bit:
            self._holders[name] = left
        else:
            del self._holders[name]
