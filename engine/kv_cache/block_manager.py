"""Manages KV blocks for requests: block tables, prefix matches, promised credit and pins.

Joins the pool's reference counts with the prefix index and counts promises. Credit is exact: free plus
evictable blocks never fall below the blocks promised, so a promised block is always available without a
preemption, and a request that grows must find room in what is left (`num_available`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.eviction import EvictionPolicy
from engine.kv_cache.lower_tiers import LowerCache
from engine.kv_cache.pool import KVBlockPool, PoolExhausted, StepHolds
from engine.kv_cache.prefix_index import PrefixIndex
from engine.kv_cache.window_blocks import WindowBlocks
from engine.types.block_moves import BlockCopy
from engine.types.kv_events import KVEventLog, Stored
from engine.types.request import Request
from engine.types.windows import WindowSet, WindowSpec, WindowTable
from tandem.errors import InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, BlockId, RequestId


@dataclass(slots=True, kw_only=True)
class _Pin:
    count: int = 0
    lingering: list[BlockId] = field(default_factory=list)
    """References that the request gave up while it was pinned, in table order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A request's cached prefix, and the blocks that admitting the whole request would take."""

    num_blocks: int
    """Blocks of the prefix, found by name; valid until the next change of the index."""
    num_parked: int
    """Number of these blocks that are evictable now, and stop being so when they are taken."""
    num_missing: int
    """Blocks for the request's other tokens."""
    num_window_blocks: int = 0
    """Blocks for its windows, those of the prefix included."""
    first_window_block: int = 0
    """First token block whose window set is needed."""
    num_indexed: int = 0
    """Blocks that are found by name; more than `num_blocks` where the windows of a longer prefix are gone."""

    @property
    def num_total(self) -> int:
        """Blocks that the whole request holds once all its tokens have theirs."""
        return self.num_blocks + self.num_missing + self.num_window_blocks

    @property
    def cost(self) -> int:
        """Available blocks used up by taking the prefix and the missing blocks, or a promise of them."""
        return self.num_parked + self.num_missing + self.num_window_blocks


class BlockManager:
    """The KV blocks of one worker: pool, prefix index, reservations, pins and tiers, kept consistent."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        events: KVEventLog,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        windows: WindowSpec | None = None,
    ) -> None:
        """`clock` measures how long requests hold blocks; None leaves that unmeasured. `windows`: of a model whose
        windowed layers have blocks of their own; None: a block holds all layers.
        """
        self.pool = KVBlockPool(num_blocks)
        self._windows = None if windows is None else WindowBlocks(self.pool, windows)
        self._num_releases = 0
        self.index = PrefixIndex(events, policy)
        self.block_size = block_size
        self._hashes_per_block = block_size // hasher.tokens_per_name
        self._hasher = hasher
        self._num_promised = 0
        self._pins: dict[RequestId, _Pin] = {}
        self._holds = StepHolds()
        self.marked_ends: Counter[BlockId] = Counter()
        """Blocks at which a chain is likely to be gone on from: the windows there are worth keeping."""
        self._below: LowerCache | None = None
        self._clock = clock

    def set_lower_cache(self, cache: LowerCache) -> None:
        """Offer evicted blocks to a cache below the pool from now on."""
        self._below = cache

    @property
    def num_promised(self) -> int:
        """Blocks promised but not yet taken."""
        return self._num_promised

    @property
    def num_available(self) -> int:
        """Blocks that may be taken, or promised, now: free or evictable, and not promised."""
        num_idle = 0 if self._windows is None else self._windows.num_idle
        return self.pool.num_free + self.index.num_parked + num_idle - self._num_promised

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def promise(self, num_blocks: int) -> None:
        """Set blocks aside without choosing them; raises PoolExhausted when fewer are available."""
        self._require(num_blocks)
        self._num_promised += num_blocks

    def unpromise(self, num_blocks: int) -> None:
        """Give up the promise of `num_blocks` blocks."""
        if num_blocks > self._num_promised:
            raise InvariantError(f"{num_blocks} blocks returned of {self._num_promised} promised")
        self._num_promised -= num_blocks

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take available blocks, evicting cached ones as needed. Raises PoolExhausted, and then takes none."""
        self._require(num_blocks)
        return [self._take()] if num_blocks == 1 else [self._take() for _ in range(num_blocks)]

    def allocate_promised(self, num_blocks: int) -> list[BlockId]:
        """Turn a promise into blocks; cannot fail. They may be written at once: their former content has been saved."""
        self.unpromise(num_blocks)
        taken = [self._take() for _ in range(num_blocks)]
        if self._below is not None:
            self._below.save_now()
        return taken

    def _require(self, num_blocks: int) -> None:
        if num_blocks > self.num_available:
            raise PoolExhausted(f"{num_blocks} KV blocks wanted, {self.num_available} available", retry_after_s=1.0)

    def _take(self) -> BlockId:
        if not self.pool.num_free:
            self._evict()
        return self.pool.allocate()

    def _evict(self) -> None:
        """Free a cached block and its window set, or the set of a block that stays: what has been idle for longer."""
        windows = self._windows
        oldest = None if windows is None else windows.oldest_idle
        if windows is None or oldest is None or (self.index.num_parked and self.index.next_parked_at <= oldest):
            self._reclaim(self.index.evict(None if self._below is None else self._below.demote))
            return
        for block in windows.evict():
            self.pool.reclaim(block)

    def _reclaim(self, block: BlockId) -> None:
        """Free a cached block that has lost its name, and its window set."""
        self.pool.reclaim(block)
        if self._windows is not None:
            for each in self._windows.detach(block):
                self.pool.reclaim(each)

    def match(
        self, request: Request, *, max_tokens: int | None = None, is_computed_elsewhere: bool = False
    ) -> PrefixMatch:
        """Look up the request's longest cached prefix, leaving at least one token to compute. Takes nothing.

        `max_tokens` bounds the prefix, for a caller that has announced its length to a peer, or wants no more.
        `is_computed_elsewhere`: the request's other tokens are not computed here, so that of the prefix's windows only
        the part is needed that its last token attends to.
        """
        num_full = (request.num_tokens - 1) // self.block_size
        self._extend_names(request, num_full)
        if max_tokens is not None:
            num_full = min(num_full, max_tokens // self.block_size)
        hashes, per_block = request.block_hashes, self._hashes_per_block
        found, in_use = self.index.measure(lambda i: hashes[(i + 1) * per_block - 1], num_full)
        needed = self.blocks_for(request.num_tokens)
        if self._windows is None:
            return PrefixMatch(num_blocks=found, num_parked=found - in_use, num_missing=needed - found)
        spec, indexed = self._windows.spec, found
        last = spec.first_block(request.num_tokens) if is_computed_elsewhere else None
        found = self._windows.usable(lambda i: self.index.find(self.name(request, i)), found, needed_from=last)
        first = spec.prefix_from(found) if last is None else last
        num_sets = min(spec.most_sets, needed - first)
        return PrefixMatch(
            num_blocks=found,
            num_parked=max(0, found - in_use),
            num_missing=needed - found,
            num_window_blocks=num_sets * spec.num_groups,
            first_window_block=first,
            num_indexed=indexed,
        )

    def found(self, request: Request, match: PrefixMatch) -> Iterator[BlockId]:
        """Blocks of a prefix just matched, in order, without those of its windows."""
        for i in range(match.num_blocks):
            if (block := self.index.find(self.name(request, i))) is None:
                return
            yield block

    def take_prefix(self, request: Request, match: PrefixMatch) -> None:
        """Start the request's table with a prefix just matched. Raises PoolExhausted, and then takes nothing."""
        self._require(match.num_parked + match.num_window_blocks)
        for i in range(match.num_blocks):
            block = self.index.find(self.name(request, i))
            if block is None:
                raise InvariantError(f"request {request.request_id}: its prefix went away before it was taken")
            if self.pool.acquire(block) == 1:
                self.index.unpark(block)
            self.index.use(block)
            request.block_table.append(block)
        if self._windows is not None:
            self._take_windows_of(request, match, self._windows)
        self._changed(request)
        request.num_computed_tokens = match.num_blocks * self.block_size

    def _take_windows_of(self, request: Request, match: PrefixMatch, windows: WindowBlocks) -> None:
        """Start the request's windows with those of a prefix that it has just taken, and promise the others."""
        table = request.windows = WindowTable(windows.spec.num_groups, first=match.first_window_block)
        # The prompt may come again; and where its names end, another sequence has parted from it.
        ends = {(request.num_prompt_tokens - 1) // self.block_size, match.num_indexed}
        if self.marked_ends:
            known = range(match.num_blocks, match.num_indexed)
            ends.update(i + 1 for i in known if self.index.find(self.name(request, i)) in self.marked_ends)
        table.kept_ends = tuple(ends - {match.num_blocks})
        for i in range(match.first_window_block, match.num_blocks):
            owner = request.block_table[i]
            found = windows.set_of(owner)
            if found is None:
                raise InvariantError(f"request {request.request_id}: a window went away before it was taken")
            self._num_promised += windows.acquire(owner)
            table.append(found)
        table.num_credits = match.num_window_blocks // windows.spec.num_groups - table.num_held
        self._num_promised += table.num_credits * windows.spec.num_groups

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each of these blocks: of a chain, from its root on, or of its window (`window_of`).

        Raises PoolExhausted, and then adds none.
        """
        self._require(self.cost_of_sharing(blocks))
        windows = self._windows
        for block in blocks:
            if windows is not None and block in windows:
                self._num_promised += windows.acquire_block(block)
            elif self.pool.acquire(block) == 1:
                self.index.unpark(block)

    def cost_of_sharing(self, blocks: Sequence[BlockId]) -> int:
        """Available blocks that `share` uses up: those that are evictable, and all of windows."""
        windows, pool = self._windows, self.pool
        return sum(not pool.num_refs(block) or (windows is not None and block in windows) for block in blocks)

    def window_of(self, chain: Sequence[BlockId]) -> list[BlockId] | None:
        """Blocks of the window at a chain's end, without which it is of no use; None where one of its sets is gone."""
        windows, found = self._windows, list[BlockId]()
        if windows is None:
            return found
        for block in chain[windows.spec.prefix_from(len(chain)) :]:
            if (blocks := windows.set_of(block)) is None:
                return None
            found += blocks
        return found

    def fork(self, request: Request, source: Request, index: int) -> list[BlockCopy]:
        """Append the request's own copy of another's token block, where `may_fork` allows it.

        The source stays as it is until the step is done. Raises PoolExhausted, and then takes nothing.
        """
        (target,) = self.allocate(1)
        self.pool.acquire(source.block_table[index])
        self._holds.hold_for_next([source.block_table[index]])
        request.block_table.append(target)
        copies = [BlockCopy(source.block_table[index], target)]
        if source.windows is not None:
            (own,) = self.cover(request, (index + 1) * self.block_size)
            copies += map(BlockCopy, source.windows.set_at(index), own)
        self._changed(request)
        return copies

    def may_fork(self, source: Request, index: int) -> bool:
        """Whether a token block of a running request holds all layers, and will until the next step is done."""
        table, windows = source.windows, self._windows
        if table is None or windows is None:
            return True
        return max(table.first, windows.spec.first_block(source.num_planned_tokens)) <= index < len(table)

    def begin_step(self) -> None:
        """Record a launched step: it may still touch blocks that are given up from now on."""
        self._holds.launch()

    def end_step(self) -> None:
        """Release the references kept for the oldest launched step, which is done."""
        self.release(self._holds.settle())

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens needs, those of its windows included."""
        return self.blocks_for(num_tokens) if self._windows is None else self._windows.spec.num_blocks(num_tokens)

    def held(self, request: Request) -> list[BlockId]:
        """Blocks that the request holds, those of its windows included."""
        blocks = [*request.block_table]
        if request.windows is not None:
            blocks += [block for _, held in request.windows.held() for block in held]
        return blocks

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request still needs for its first `num_tokens` tokens, those of its windows included."""
        token_blocks = self.blocks_for(num_tokens)
        missing = max(0, token_blocks - len(request.block_table))
        table = request.windows
        if table is None or self._windows is None:
            return missing
        spec = self._windows.spec
        num_sets = min(spec.most_sets, token_blocks - table.first) - table.num_held - table.num_credits
        return missing + spec.num_groups * max(0, num_sets)

    def extend(self, request: Request, num_tokens: int) -> None:
        """Take the blocks that the request still needs for its first `num_tokens` tokens; its windows' are promised.

        Raises PoolExhausted, and then takes none.
        """
        num_missing = self.num_missing(request, num_tokens)
        num_blocks = max(0, self.blocks_for(num_tokens) - len(request.block_table))
        if not num_missing:
            return
        self._require(num_missing)
        if request.windows is not None and self._windows is not None:
            self._num_promised += num_missing - num_blocks
            request.windows.num_credits += (num_missing - num_blocks) // self._windows.spec.num_groups
        self.grow(request, [self._take() for _ in range(num_blocks)])

    def grow(self, request: Request, blocks: Sequence[BlockId]) -> None:
        """Append blocks that were just allocated."""
        request.block_table.extend(blocks)
        self._changed(request)

    def coverable_tokens(self, request: Request) -> int | None:
        """Tokens that the blocks of the request's windows can cover, those promised included; None: any number."""
        table = request.windows
        return None if table is None else (len(table) + table.num_credits) * self.block_size

    def cover(self, request: Request, num_tokens: int) -> list[WindowSet]:
        """Take promised blocks for the request's windows up to its first `num_tokens` tokens. Returns their sets."""
        table, taken = request.windows, list[WindowSet]()
        if table is None or self._windows is None:
            return taken
        num_groups = self._windows.spec.num_groups
        for _ in range(self.blocks_for(num_tokens) - len(table)):
            if not table.num_credits:
                raise InvariantError(f"request {request.request_id}: no block is promised for its windows")
            table.num_credits -= 1
            self.unpromise(num_groups)
            blocks = tuple(self._take() for _ in range(num_groups))
            self._windows.take(blocks)
            table.append(blocks)
            taken.append(blocks)
        if taken:
            self._changed(request)
        return taken

    def slide(self, request: Request) -> None:
        """Give up the sets that no further token of the request attends to, and credit that it will not need.

        Steps under way compute only tokens after `num_computed_tokens`, so none of them reads such a set.
        """
        table, windows = request.windows, self._windows
        if table is None or windows is None:
            return
        spec = windows.spec
        first = min(spec.first_block(request.num_computed_tokens), len(table))
        while table.first < first:
            is_kept = any(spec.prefix_from(end) <= table.first < end for end in table.kept_ends)
            blocks = table.give_up_first()
            if is_kept:
                windows.keep(blocks)
            windows.give_up(blocks)
            self.release(blocks)
            self._num_promised += spec.num_groups
            table.num_credits += 1
        most = min(spec.most_sets, len(request.block_table) - table.first)
        surplus = min(table.num_credits, max(0, table.num_held + table.num_credits - most))
        table.num_credits -= surplus
        self.unpromise(surplus * spec.num_groups)
        self._changed(request)

    def take_table(self, request: Request) -> list[BlockId]:
        """Detach the request's blocks and return them in table order, for the caller to release. Credit ends."""
        blocks = request.block_table.clear()
        table, windows = request.windows, self._windows
        if table is not None and windows is not None:
            for _, held in table.held():
                # A later request may go on from where this one has ended.
                windows.keep(held)
                blocks.extend(held)
            self.unpromise(table.num_credits * windows.spec.num_groups)
            request.windows = None
        self._changed(request)
        return blocks

    def _changed(self, request: Request) -> None:
        table, num_blocks = request.windows, len(request.block_table)
        if table is not None:
            num_blocks += table.num_held * len(table.groups)
        request.held.change(num_blocks, self._clock())

    def index_computed(self, request: Request, first_block: int) -> list[BlockId]:
        """Make the request's full computed blocks, from `first_block` on, findable by content.

        A name has one block. Where another block already has the name and is in use, the table is pointed at that one
        and the request's own copy is returned, for the caller to release; where it is merely cached, the own
        copy takes the name over instead, so that credit never depends on which request computed a block twice.
        """
        num_full = request.num_computed_tokens // self.block_size
        self._extend_names(request, num_full)
        displaced: list[BlockId] = []
        windows = request.windows
        for i in range(first_block, num_full):
            name, own = self.name(request, i), request.block_table[i]
            canonical = self.index.find(name)
            if canonical is None:
                parent = self.name(request, i - 1) if i else request.hash_root
                self.index.insert(name, own, parent=parent, is_first=i == 0)
            elif self.index.is_parked(name):
                self._reclaim(self.index.rebind(name, own))
            elif canonical != own:
                self.pool.acquire(canonical)
                request.block_table.replace(i, canonical)
                displaced.append(own)
            if windows is not None and self._windows is not None and windows.first <= i < len(windows):
                for block in self._windows.attach(request.block_table[i], windows.set_at(i)):
                    self.pool.reclaim(block)
        return displaced

    def _extend_names(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks * self._hashes_per_block:
            self._hasher.extend(request.hash_root, request.block_hashes, request.token_ids)

    def name(self, request: Request, block_index: int) -> BlockHash:
        """Content name of a full block of the request; only once `match` or `index_computed` has reached this block."""
        return request.block_hashes[(block_index + 1) * self._hashes_per_block - 1]

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each block, given in table order. The tail goes first, so that it is evicted first."""
        self._num_releases += 1
        windows = self._windows
        for block in reversed(blocks):
            if windows is not None and block in windows:
                num_refs = self.pool.release(block, keep=windows.keeps(block))
                if num_refs:
                    # The block that was promised for this reference replaces what is left to the others.
                    self.unpromise(1)
                windows.released(block, num_refs, self._num_releases)
                continue
            indexed = self.index.holds(block)
            if not self.pool.release(block, keep=indexed) and indexed:
                self.index.park(block, self._num_releases)

    def release_after_use(self, request_id: RequestId, blocks: Sequence[BlockId]) -> None:
        """Release blocks of a request, once no step can touch them, or set them aside while it is pinned."""
        pin = self._pins.get(request_id)
        if pin is not None:
            pin.lingering.extend(blocks)
        elif not self._holds.hold(blocks):
            self.release(blocks)

    def release_after_next_step(self, blocks: Sequence[BlockId]) -> None:
        """Release blocks that the step now being planned writes first."""
        self._holds.hold_for_next(blocks)

    def invalidate(self, request: Request) -> None:
        """Unindex the request's blocks, whose content may be invalid, except those that others share."""
        for i in range(request.num_computed_tokens // self.block_size - 1, -1, -1):
            block = request.block_table[i]
            if self.pool.num_refs(block) > 1:
                return
            if not self.index.holds(block):
                continue
            if not self.index.withdraw(block):
                return
            if self._windows is not None:
                for each in self._windows.detach(block):
                    self.pool.reclaim(each)
            if self._below is not None:
                self._below.forget(self.name(request, i))

    def pin(self, request_id: RequestId) -> None:
        """Keep every block that the request holds, or will hold, from reuse until a matching `unpin`. Calls nest."""
        self._pins.setdefault(request_id, _Pin()).count += 1

    def unpin(self, request_id: RequestId) -> None:
        """Undo one `pin`; the last one releases the blocks that the request gave up meanwhile."""
        pin = self._pins.get(request_id)
        if pin is None:
            raise InvariantError(f"request {request_id} is not pinned")
        pin.count -= 1
        if not pin.count:
            del self._pins[request_id]
            if not self._holds.hold(pin.lingering):
                self.release(pin.lingering)

    def is_pinned(self, request_id: RequestId) -> bool:
        """Whether a transfer may still read the request's blocks."""
        return request_id in self._pins

    def pinned_blocks(self) -> list[BlockId]:
        """References kept only by a pin or a step under way, for audits."""
        return [*(block for pin in self._pins.values() for block in pin.lingering), *self._holds]

    def clear_cache(self) -> None:
        """Forget every unreferenced cached block."""
        if self._below is not None:
            self._below.clear()
        for block in self.index.clear():
            self._reclaim(block)
        if self._windows is not None:
            while self._windows.num_idle:
                for block in self._windows.evict():
                    self.pool.reclaim(block)

    def snapshot(self) -> tuple[int, list[Stored]]:
        """Number of the next event, and every name stored before it, those below the pool included."""
        next_seq, stored = self.index.snapshot()
        if self._below is not None:
            stored += [Stored(name, None) for name in self._below.names() if self.index.find(name) is None]
        return next_seq, stored

    def check_invariants(self) -> None:
        """Check that pool and index agree and that credit is covered; O(num_blocks), for tests and audits."""
        self.pool.check_invariants()
        self.index.check_invariants()
        num_idle = self.index.num_parked
        if self._windows is not None:
            self._windows.check_invariants()
            num_idle += self._windows.num_idle
        if self.pool.num_idle != num_idle:
            raise InvariantError(f"{self.pool.num_idle} idle blocks, {num_idle} parked entries and window blocks")
        if self._num_promised < 0 or self.num_available < 0:
            raise InvariantError(f"{self._num_promised} blocks promised, {self.num_available} available beyond them")
