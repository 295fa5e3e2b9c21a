"""Maps each prefix to the workers that hold it: block name -> bit set of workers, in memory, without I/O. Pure.

Workers' events are authoritative (`apply`). Between a dispatch and its events, blocks that a worker is about to compute
are *expected* (`expect`): a stored event confirms them; an evicted event, `revoke` or a timeout ends them. A worker's
entries never exceed its real capacity, so the map is bounded by the cluster's KV memory; dropping a worker costs time
linear in its own blocks only. A wrong entry only causes tokens to be computed.

A worker is *approximate* until its snapshot arrives, and again when events were missed or fail to arrive. After a gap
in its numbering its entries are dropped: what is learnt later is true but incomplete. If it has computed a prompt and
reports nothing about its blocks for `silence_s`, it counts as silent: what it was sent to compute is then assumed to be
cached, in an LRU order like its own, until its next snapshot.

Within one prompt the last block counts as used before the first, as on a worker, so a block is never evicted before the
blocks that follow it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby, repeat

import numpy as np

from router.types.worker_view import PrefixChange
from router.workers.columns import Slots, empty_slots
from tandem.values.ids import BlockHash, WorkerId

_MOST_SETS = 4096
_FEW_BITS = 8
"""Up to this many bits are faster taken one by one than through an array."""


_Expected = tuple[float, int, int]
"""State of an expected block: the time when it lapses, the position of its last hash block in its prompt, and the
number of prompts that expect it. Names are chained, so the position is the same in every prompt that has the block."""


class _Holdings:
    """One worker's names: known ones oldest first, expected ones by the time they lapse."""

    __slots__ = (
        "bit",
        "capacity",
        "due_s",
        "expected",
        "known",
        "names_per_block",
        "next_sequence",
        "silent",
        "slot",
        "synchronised",
        "waits_since_s",
        "worker",
    )

    def __init__(self, worker: WorkerId, slot: int, capacity: int, names_per_block: int) -> None:
        self.worker = worker
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity
        self.names_per_block = names_per_block
        self.known: OrderedDict[BlockHash, None] = OrderedDict()
        self.expected: OrderedDict[BlockHash, _Expected] = OrderedDict()
        self.next_sequence: int | None = None
        self.synchronised = False
        self.silent = False
        self.due_s: float | None = None
        """Time by which events of a computed prompt must have arrived."""
        self.waits_since_s: float | None = None
        """Time since which a snapshot has been awaited."""


class PrefixMap:
    """Maps names of blocks to the workers that hold them."""

    def __init__(self, *, expectation_s: float = 30.0, silence_s: float = 10.0) -> None:
        """An expected block that no event confirms within `expectation_s` is forgotten."""
        self._expectation_s = expectation_s
        self._silence_s = silence_s
        self._holders: dict[BlockHash, int] = {}
        self._workers: dict[WorkerId, _Holdings] = {}
        self._slots: list[_Holdings | None] = []
        self._free_slots: list[int] = []
        self._groups: dict[int, int] = {}
        """Bits of the workers, grouped by how many hash blocks one of their blocks holds."""
        self._sets: dict[int, int] = {}
        self._lapses: deque[tuple[float, _Holdings]] = deque()
        """Times at which workers' expectations end, earliest first."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_approximate(self) -> int:
        """Number of workers whose blocks are not all known."""
        return sum(not held.synchronised for held in self._workers.values())

    def add_worker(self, worker: WorkerId, *, capacity: int, names_per_block: int = 1) -> int:
        """Start following a worker whose pool has room for `capacity` blocks; forgets an earlier incarnation of it.

        `names_per_block`: hash blocks in one of its blocks, which it knows by the last one's name.
        Returns the worker's slot: its place in what `match` returns, for as long as it is followed.
        """
        self.drop_worker(worker)
        if self._free_slots:
            slot = heappop(self._free_slots)
        else:
            slot = len(self._slots)
            self._slots.append(None)
        held = self._slots[slot] = self._workers[worker] = _Holdings(worker, slot, capacity, names_per_block)
        self._groups[names_per_block] = self._groups.get(names_per_block, 0) | held.bit
        return slot

    def drop_worker(self, worker: WorkerId) -> None:
        """Forget a worker and its blocks; no-op for an unknown one."""
        if (held := self._workers.pop(worker, None)) is not None:
            self._forget_all(held)
            self._slots[held.slot] = None
            heappush(self._free_slots, held.slot)
            self._groups[held.names_per_block] ^= held.bit

    def num_blocks(self, worker: WorkerId) -> int:
        """Number of blocks, known and expected, that the worker is thought to hold."""
        held = self._workers[worker]
        return len(held.known) + len(held.expected)

    def is_approximate(self, worker: WorkerId) -> bool:
        """Whether events were missed since the worker's last snapshot, or none came yet."""
        return not self._workers[worker].synchronised

    def apply(self, worker: WorkerId, change: PrefixChange) -> None:
        """Apply a worker's events; repeated ones are skipped, a gap drops what was known."""
        held = self._workers[worker]
        held.due_s = None
        held.silent = False
        if change.snapshot:
            self._forget_all(held)
            held.next_sequence = change.first_sequence
            held.synchronised = True
            held.waits_since_s = None
            self._apply(held, change.changes)
            return
        due = change.first_sequence if held.next_sequence is None else held.next_sequence
        if change.first_sequence > due:
            self._forget_all(held)
            held.synchronised = False
        held.next_sequence = max(due, change.first_sequence + len(change.changes))
        self._apply(held, change.changes[max(0, due - change.first_sequence) :])

    def expect(self, worker: WorkerId, names: Sequence[BlockHash], *, now_s: float) -> None:
        """Expect the blocks of a prompt that was just sent to the worker; `names`: of all its hash blocks."""
        held = self._workers.get(worker)
        if held is None:
            return
        own = names[held.names_per_block - 1 :: held.names_per_block]
        if held.silent:
            self._store(held, own)
            return
        # The leading blocks that it has; as in `_descend`, runs of blocks have the very same holders.
        num_held, before = 0, 0
        for holders in map(self._holders.get, own):
            if holders is not before:
                if holders is None or not holders & held.bit:
                    break
                before = holders
            num_held += 1
        if num_held == len(own) and not held.expected:
            # It knows all of them, so there is nothing to expect.
            self._touch(held, own)
            return
        lapses_s, fresh = now_s + self._expectation_s, own[num_held:]
        self._lapses.append((lapses_s, held))
        fits = len(held.known) + len(held.expected) + len(fresh) <= held.capacity
        if not fits or not self._holders.keys().isdisjoint(fresh):
            self._touch(held, own)
            self._expect_each(held, own, lapses_s)
            return
        # The usual case: no worker has the blocks that this one lacks.
        leading = own[:num_held]
        self._touch(held, leading)
        if held.expected:
            self._expect_each(held, leading, lapses_s)
        if not fresh:
            return
        positions = range((num_held + 1) * held.names_per_block - 1, len(names), held.names_per_block)
        self._holders.update(dict.fromkeys(fresh, held.bit))
        held.expected.update(zip(fresh, zip(repeat(lapses_s), positions, repeat(1)), strict=False))

    def _expect_each(self, held: _Holdings, own: Sequence[BlockHash], lapses_s: float) -> None:
        """Expect blocks of which some are expected already, or may not fit."""
        known, expected = held.known, held.expected
        for index, name in enumerate(own, 1):
            if name in known:
                continue
            num_prompts = 1
            if (others := expected.get(name)) is not None:
                expected.move_to_end(name)
                num_prompts += others[2]
            else:
                self._list(name, held.bit)
            expected[name] = lapses_s, index * held.names_per_block - 1, num_prompts
            # The newest expectation is dropped, not the oldest: a prefix is useful from its beginning.
            if len(known) + len(expected) > held.capacity:
                self._forget(held, (name,))
                return

    def use(self, worker: WorkerId, names: Sequence[BlockHash]) -> None:
        """Record that the worker uses these blocks (names of their hash blocks), so that its LRU keeps them longer."""
        if (held := self._workers.get(worker)) is not None:
            self._touch(held, names[held.names_per_block - 1 :: held.names_per_block])

    def computed(self, worker: WorkerId, names: Sequence[BlockHash], *, now_s: float) -> None:
        """Record that the worker has computed a prompt: if its last block is new, events must follow."""
        held = self._workers.get(worker)
        if held is None or held.due_s is not None or not held.synchronised:
            return
        num_whole = len(names) // held.names_per_block * held.names_per_block
        if num_whole and names[num_whole - 1] in held.expected:
            held.due_s = now_s + self._silence_s

    def lacks_snapshot(self, worker: WorkerId, now_s: float) -> bool:
        """Whether to request a snapshot from the worker now; requests to one worker are `silence_s` apart.

        Call this when the worker shows that it is alive: only then is a lack of cache events significant.
        """
        held = self._workers[worker]
        if held.synchronised:
            if held.due_s is None or now_s < held.due_s:
                return False
            self._fall_silent(held)
        elif held.waits_since_s is None:
            held.waits_since_s = now_s
            return False
        elif now_s < held.waits_since_s + self._silence_s:
            return False
        held.waits_since_s = now_s
        return True

    def revoke(self, worker: WorkerId, names: Iterable[BlockHash]) -> None:
        """Drop the expectations of one prompt that the worker will not compute; confirmed and otherwise expected blocks
        stay."""
        held = self._workers.get(worker)
        if held is None:
            return
        ended: list[BlockHash] = []
        find = held.expected.get
        for name in names:
            if (expected := find(name)) is None:
                continue
            lapses_s, position, num_prompts = expected
            if num_prompts > 1:
                held.expected[name] = lapses_s, position, num_prompts - 1
            else:
                ended.append(name)
        self._forget(held, ended)

    def expire(self, now_s: float) -> None:
        """End expectations that were never confirmed."""
        while self._lapses and self._lapses[0][0] <= now_s:
            held = self._lapses.popleft()[1]
            while held.expected:
                name, (lapses_s, *_) = next(iter(held.expected.items()))
                if lapses_s > now_s:
                    break
                self._forget(held, (name,))

    def match(self, names: Sequence[BlockHash], *, weight: int = 1) -> Slots:
        """Count, by worker slot, the leading hash blocks of `names` that each worker holds without a gap; each counts
        as `weight`."""
        found = empty_slots(len(self._slots))
        for per_block, members in self._groups.items():
            if members:
                self._descend(names[per_block - 1 :: per_block], members, per_block * weight, found)
        return found

    def longest_prefix(self, names: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Return the same by worker; those that hold nothing are absent."""
        found = self.match(names)
        return {held.worker: int(found[held.slot]) for held in self._workers.values() if found[held.slot]}

    def holders(self, name: BlockHash) -> list[WorkerId]:
        """Return the workers that are thought to hold the block of this name."""
        bits = self._holders.get(name, 0)
        return [held.worker for held in self._workers.values() if held.bit & bits]

    def num_confirmed(self, worker: WorkerId, names: Sequence[BlockHash]) -> int:
        """Count the confirmed blocks among the leading hash blocks that the worker is thought to hold.

        Takes time linear in the shorter of `names` and what is expected.
        """
        held = self._workers[worker]
        if held.silent:
            return 0
        per_block, length = held.names_per_block, len(names)
        if len(held.expected) * per_block < length:
            items = held.expected.items()
            first = min((i for name, (_, i, _) in items if i < length and names[i] == name), default=None)
        elif held.expected.keys().isdisjoint(names):
            first = None
        else:
            first = next((i for i in range(per_block - 1, length, per_block) if names[i] in held.expected), None)
        return length if first is None else first - (per_block - 1)

    def _descend(self, names: Sequence[BlockHash], members: int, weight: int, found: Slots) -> None:
        """Write the same for workers with blocks of one size, by the names of such blocks; each counts as `weight`."""
        find = self._holders.get
        alive = find(names[0], 0) & members if names else 0
        if not alive:
            return
        depth, before = 0, 0
        for held in map(find, names):
            # Runs of blocks are mostly held by the same workers, that is, by the very same number; see `_shared`.
            if held is not before:
                if held is None:
                    break
                kept = alive & held
                if kept != alive:
                    _write(depth * weight, alive ^ kept, found)
                    if not kept:
                        return
                    alive = kept
                before = held
            depth += 1
        _write(depth * weight, alive, found)

    def _touch(self, held: _Holdings, names: Sequence[BlockHash]) -> None:
        known = held.known
        deque(map(known.move_to_end, filter(known.__contains__, reversed(names))), maxlen=0)

    def _apply(self, held: _Holdings, changes: Sequence[tuple[BlockHash, bool]]) -> None:
        for stored, run in groupby(changes, key=_is_stored):
            names = [name for name, _ in run]
            if stored:
                self._store(held, names)
            else:
                self._forget(held, names)

    def _store(self, held: _Holdings, names: Sequence[BlockHash]) -> None:
        """Mark blocks as known, each following those before it."""
        known, expected = held.known, held.expected
        fits = len(known) + len(expected) + len(names) <= held.capacity
        for name in reversed(names):
            if name in expected:
                del expected[name]
            elif name in known:
                known.move_to_end(name)
                continue
            else:
                self._list(name, held.bit)
            known[name] = None
            if not fits and len(known) + len(expected) > held.capacity:
                self._forget(held, (next(iter(expected or known)),))

    def _fall_silent(self, held: _Holdings) -> None:
        held.synchronised, held.silent, held.due_s = False, True, None
        for name in reversed(held.expected):
            held.known[name] = None
        held.expected.clear()

    def _forget(self, held: _Holdings, names: Iterable[BlockHash]) -> None:
        known, expected, holders, bit = held.known, held.expected, self._holders, held.bit
        before, left = 0, 0
        for name in names:
            if name in known:
                del known[name]
            elif name in expected:
                del expected[name]
            else:
                continue
            others = holders[name]
            if others is not before:
                before = others
                left = self._without(others, bit)
            if left:
                holders[name] = left
            else:
                del holders[name]

    def _forget_all(self, held: _Holdings) -> None:
        self._forget(held, list(held.known))
        self._forget(held, list(held.expected))

    def _list(self, name: BlockHash, bit: int) -> None:
        others = self._holders.get(name)
        self._holders[name] = bit if others is None else self._shared(others | bit)

    def _without(self, bits: int, bit: int) -> int:
        left = bits & ~bit
        return self._shared(left) if left else 0

    def _shared(self, bits: int) -> int:
        # Equal sets share one int object: that saves memory, and lets `_descend` compare by identity.
        if len(self._sets) >= _MOST_SETS:
            self._sets.clear()
        return self._sets.setdefault(bits, bits)


def _write(number: int, bits: int, found: Slots) -> None:
    """Write a number into the slots of these workers."""
    if not isinstance(found, list) and bits.bit_count() > _FEW_BITS:
        octets = np.frombuffer(bits.to_bytes((len(found) + 7) // 8, "little"), dtype=np.uint8)
        found[np.unpackbits(octets, count=len(found), bitorder="little").view(np.bool_)] = number
        return
    while bits:
        slot = bits.bit_length() - 1
        found[slot] = number
        bits ^= 1 << slot


def _is_stored(change: tuple[BlockHash, bool]) -> bool:
    return change[1]
