"""Manages KV blocks for requests: block tables, prefix matches, promised credit and pins.

Joins the pool's reference counts with the prefix index and counts promises. Credit is exact: free plus
evictable blocks never fall below the blocks promised, so a promised block is always available without a
preemption, and a request that grows must find room in what is left (`num_available`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.eviction import EvictionPolicy
from engine.kv_cache.lower_tiers import LowerCache
from engine.kv_cache.pool import KVBlockPool, PoolExhausted, StepHolds
from engine.kv_cache.prefix_index import PrefixIndex
from engine.types.block_moves import BlockCopy
from engine.types.kv_events import KVEventLog, Stored
from engine.types.request import Request
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

    @property
    def cost(self) -> int:
        """Available blocks used up by taking the prefix and the missing blocks, or a promise of them."""
        return self.num_parked + self.num_missing


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
    ) -> None:
        """`clock` measures how long requests hold blocks; None leaves that unmeasured."""
        self.pool = KVBlockPool(num_blocks)
        self.index = PrefixIndex(events, policy)
        self.block_size = block_size
        self._hashes_per_block = block_size // hasher.tokens_per_name
        self._hasher = hasher
        self._num_promised = 0
        self._pins: dict[RequestId, _Pin] = {}
        self._holds = StepHolds()
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
        return self.pool.num_free + self.index.num_parked - self._num_promised

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
            self.pool.reclaim(self.index.evict(None if self._below is None else self._below.demote))
        return self.pool.allocate()

    def match(self, request: Request, *, max_tokens: int | None = None) -> PrefixMatch:
        """Look up the request's longest cached prefix, leaving at least one token to compute. Takes nothing.

        `max_tokens` bounds the prefix, for a caller that has announced its length to a peer, or wants no more.
        """
        num_full = (request.num_tokens - 1) // self.block_size
        self._extend_names(request, num_full)
        if max_tokens is not None:
            num_full = min(num_full, max_tokens // self.block_size)
        hashes, per_block = request.block_hashes, self._hashes_per_block
        found, in_use = self.index.measure(lambda i: hashes[(i + 1) * per_block - 1], num_full)
        missing = self.blocks_for(request.num_tokens) - found
        return PrefixMatch(num_blocks=found, num_parked=found - in_use, num_missing=missing)

    def found(self, request: Request, match: PrefixMatch) -> Iterator[BlockId]:
        """Blocks of a prefix just matched, in order."""
        names = (self.name(request, i) for i in range(match.num_blocks))
        return (block for name in names if (block := self.index.find(name)) is not None)

    def take_prefix(self, request: Request, match: PrefixMatch) -> None:
        """Start the request's table with a prefix just matched. Raises PoolExhausted, and then takes nothing."""
        self._require(match.num_parked)
        for i in range(match.num_blocks):
            block = self.index.find(self.name(request, i))
            if block is None:
                raise InvariantError(f"request {request.request_id}: its prefix went away before it was taken")
            if self.pool.acquire(block) == 1:
                self.index.unpark(block)
            self.index.use(block)
            request.block_table.append(block)
        self._changed(request)
        request.num_computed_tokens = match.num_blocks * self.block_size

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each block of a chain, from its root on. Raises PoolExhausted, and then adds none."""
        self._require(sum(1 for block in blocks if not self.pool.num_refs(block)))
        for block in blocks:
            if self.pool.acquire(block) == 1:
                self.index.unpark(block)

    def fork(self, request: Request, source: BlockId) -> BlockCopy:
        """Append the request's own copy of a block in use; the source stays referenced until the step is done.

        Raises PoolExhausted, and then takes nothing.
        """
        (target,) = self.allocate(1)
        self.pool.acquire(source)
        self._holds.hold_for_next([source])
        request.block_table.append(target)
        self._changed(request)
        return BlockCopy(source, target)

    def begin_step(self) -> None:
        """Record a launched step: it may still touch blocks that are given up from now on."""
        self._holds.launch()

    def end_step(self) -> None:
        """Release the references kept for the oldest launched step, which is done."""
        self.release(self._holds.settle())

    def grow(self, request: Request, blocks: Sequence[BlockId]) -> None:
        """Append blocks that were just allocated."""
        request.block_table.extend(blocks)
        self._changed(request)

    def take_table(self, request: Request) -> list[BlockId]:
        """Detach the request's blocks and return them in table order, for the caller to release."""
        blocks = request.block_table.clear()
        self._changed(request)
        return blocks

    def _changed(self, request: Request) -> None:
        request.held.change(len(request.block_table), self._clock())

    def index_computed(self, request: Request, first_block: int) -> list[BlockId]:
        """Make the request's full computed blocks, from `first_block` on, findable by content.

        A name has one block. Where another block already has the name and is in use, the table is pointed at that one
        and the request's own copy is returned, for the caller to release; where it is merely cached, the own
        copy takes the name over instead, so that credit never depends on which request computed a block twice.
        """
        num_full = request.num_computed_tokens // self.block_size
        self._extend_names(request, num_full)
        displaced: list[BlockId] = []
        for i in range(first_block, num_full):
            name, own = self.name(request, i), request.block_table[i]
            canonical = self.index.find(name)
            if canonical is None:
                parent = self.name(request, i - 1) if i else request.hash_root
                self.index.insert(name, own, parent=parent, is_first=i == 0)
            elif self.index.is_parked(name):
                self.pool.reclaim(self.index.rebind(name, own))
            elif canonical != own:
                self.pool.acquire(canonical)
                request.block_table.replace(i, canonical)
                displaced.append(own)
        return displaced

    def _extend_names(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks * self._hashes_per_block:
            self._hasher.extend(request.hash_root, request.block_hashes, request.token_ids)

    def name(self, request: Request, block_index: int) -> BlockHash:
        """Content name of a full block of the request; only once `match` or `index_computed` has reached this block."""
        return request.block_hashes[(block_index + 1) * self._hashes_per_block - 1]

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each block, given in table order. The tail goes first, so that it is evicted first."""
        for block in reversed(blocks):
            indexed = self.index.holds(block)
            if not self.pool.release(block, keep=indexed) and indexed:
                self.index.park(block)

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
        if self.pool.num_idle != self.index.num_parked:
            raise InvariantError(f"{self.pool.num_idle} idle blocks, {self.index.num_parked} parked entries")
        if self._num_promised < 0 or self.num_available < 0:
            raise InvariantError(f"{self._num_promised} blocks promised, {self.num_available} available beyond them")
