"""Pinned prefixes: kept in the pool at a tenant's request, each until a time, together within bounds. Pure.

Life of a pin: `pin` keeps every block from the chain's root to its last block, all of which must be in the pool; the
same key again renews it; it ends by time (`expire`), by its tenant (`unpin`), or by giving way. All pins together have
one reference on each block that they keep. A referenced block is never evicted, and not counted as available: promises
and reservations need know nothing of pins.

Where windowed layers have blocks of their own, a pin keeps the window at its end as well. Inside a prompt that window
may be gone when the order comes: its blocks are then kept without it, the next sequence that has to compute them again
leaves it (`BlockManager.marked_ends`), and the renewal that follows takes it.

Bounds. All pins together hold at most `max_blocks` blocks, one tenant's at most `max_tenant_blocks`: a tenant's new pin
takes the place of that tenant's least recently used ones, never of another tenant's. What is left of the pool is the
*rest*: a request that fits in it never touches a pin. A larger one, which would otherwise wait for ever, makes pins
give way, the least recently used first and no more than it needs (`make_way`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv_cache.block_manager import BlockManager
from engine.types.request import Request
from tandem.errors import InvalidRequest
from tandem.values.ids import BlockHash, BlockId
from tandem.values.prefix_pin import MAX_PIN_NAME_CHARS, MAX_PIN_S, PinKey, PinOrder, PinOutcome, PinResult, PinTotals

_FOREVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinBounds:
    """Most blocks that all pins, and one tenant's pins, may hold."""

    max_blocks: int = 0
    max_tenant_blocks: int = 0

    @classmethod
    def from_shares(cls, num_blocks: int, *, share: float, tenant_share: float) -> "PinBounds":
        """Bounds as shares of a pool of `num_blocks` blocks, between 0 and 1."""
        return cls(max_blocks=int(num_blocks * share), max_tenant_blocks=int(num_blocks * tenant_share))


@dataclass(slots=True, kw_only=True)
class _Pin:
    last_block: BlockHash
    blocks: tuple[BlockId, ...]
    """Blocks of the prefix, from the root on, then those of the windows at its end."""
    num_chained: int
    """Blocks of the prefix alone."""
    has_window: bool
    """Whether a request can go on from its end: false while the window there is not kept."""
    ends_s: float


class PrefixPins:
    """All pins of one worker. Touched by the engine thread alone."""

    def __init__(self, blocks: BlockManager, bounds: PinBounds, *, lost: Callable[[PinKey], None]) -> None:
        """`lost` is called with each pin that gives way."""
        self._blocks = blocks
        self._bounds = bounds
        self._lost = lost
        # In order of making or renewal, the oldest first.
        self._pins: dict[PinKey, _Pin] = {}
        self._by_block: Counter[BlockId] = Counter()
        self._by_tenant: dict[str, Counter[BlockId]] = {}
        self._soonest_s = _FOREVER
        """Lower bound of the time when the next pin ends."""
        self._made = self._renewed = self._refused = self._gave_way = self._expired = 0

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, order: PinOrder, now: float) -> PinResult:
        """Make or renew a pin. Raises InvalidRequest for a name or `ttl_s` out of bounds."""
        if not 0.0 < order.ttl_s <= MAX_PIN_S or not 0 < len(order.key.name) <= MAX_PIN_NAME_CHARS:
            bounds = f"name must have 1 to {MAX_PIN_NAME_CHARS} characters, ttl_s must be in (0, {MAX_PIN_S:g}]"
            raise InvalidRequest(f"pin: {bounds}", param="ttl_s")
        # An idle engine expires nothing else, and an expired pin must not take this one's room.
        self.expire(now)
        known = self._pins.get(order.key)
        if known is not None and known.last_block == order.last_block:
            return self._renew(order, known, now)
        if known is not None:
            self.unpin(order.key)
        chain = self._blocks.index.chain_to(order.last_block)
        if chain is None:
            self._refused += 1
            return PinResult(key=order.key, outcome=PinOutcome.NOT_HERE)
        window = self._blocks.window_of(chain)
        blocks = (*chain, *(window or ()))
        if not self._keep(order.key.tenant, blocks):
            self._refused += 1
            return PinResult(key=order.key, outcome=PinOutcome.NO_ROOM)
        self._blocks.marked_ends[chain[-1]] += 1
        made = _Pin(
            last_block=order.last_block,
            blocks=blocks,
            num_chained=len(chain),
            has_window=window is not None,
            ends_s=now + order.ttl_s,
        )
        self._pins[order.key] = made
        self._soonest_s = min(self._soonest_s, made.ends_s)
        self._made += 1
        return self._held_outcome(order.key, made)

    def _renew(self, order: PinOrder, pin: _Pin, now: float) -> PinResult:
        self._renewed += 1
        pin.ends_s = now + order.ttl_s
        # A renewed pin may end earlier than before.
        self._soonest_s = min(self._soonest_s, pin.ends_s)
        self._pins[order.key] = self._pins.pop(order.key)
        window = None if pin.has_window else self._blocks.window_of(pin.blocks)
        if window is not None and self._keep(order.key.tenant, window, beside=pin.blocks):
            pin.blocks, pin.has_window = (*pin.blocks, *window), True
        return self._held_outcome(order.key, pin)

    def _held_outcome(self, key: PinKey, pin: _Pin) -> PinResult:
        num_tokens = pin.num_chained * self._blocks.block_size if pin.has_window else 0
        return PinResult(key=key, outcome=PinOutcome.HELD, num_tokens=num_tokens)

    def _keep(self, tenant: str, blocks: Sequence[BlockId], *, beside: Sequence[BlockId] = ()) -> bool:
        """Keep blocks of a pin that keeps those `beside` already. Returns False, with nothing changed, without room."""
        if not self._have_room(tenant, [*beside, *blocks]):
            return False
        self._blocks.share(self._not_kept(blocks))
        self._by_block.update(blocks)
        self._by_tenant.setdefault(tenant, Counter()).update(blocks)
        return True

    def _not_kept(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        return [block for block in blocks if block not in self._by_block]

    def _have_room(self, tenant: str, blocks: Sequence[BlockId]) -> bool:
        """Release older pins of the tenant as needed. Returns False, with none released, if that is not enough."""
        bounds = self._bounds
        others = sum(len(held) for name, held in self._by_tenant.items() if name != tenant)
        most = min(bounds.max_tenant_blocks, bounds.max_blocks - others)
        # A pin that gives way makes as many blocks available as keeping the same ones then takes.
        cost = self._blocks.cost_of_sharing(self._not_kept(blocks))
        if len(blocks) > most or cost > self._blocks.num_available:
            return False
        own = [key for key in self._pins if key.tenant == tenant]
        wanted, held = set(blocks), self._by_tenant.get(tenant, Counter())
        num_held = len(held.keys() | wanted)
        for given, key in enumerate(own):
            # Bounds the number of pins as well: each has at least one block.
            if num_held <= most and len(own) - given < most:
                break
            # Only this pin's blocks are counted again: there may be thousands of pins of thousands of blocks each.
            gone = self._pins[key].blocks
            self._give_way(key)
            num_held -= sum(1 for block in gone if block not in held and block not in wanted)
        return True

    def unpin(self, key: PinKey) -> bool:
        """End a pin; False when it does not exist."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return False
        held = self._by_tenant[key.tenant]
        for block in pin.blocks:
            _count_down(self._by_block, block)
            _count_down(held, block)
        if not held:
            del self._by_tenant[key.tenant]
        _count_down(self._blocks.marked_ends, pin.blocks[pin.num_chained - 1])
        self._blocks.release(self._not_kept(pin.blocks))
        return True

    def _give_way(self, key: PinKey) -> None:
        if self.unpin(key):
            self._gave_way += 1
            self._lost(key)

    def expire(self, now: float) -> None:
        """End expired pins; O(1) while there are none."""
        if now < self._soonest_s:
            return
        for key in [key for key, pin in self._pins.items() if pin.ends_s <= now]:
            self.unpin(key)
            self._expired += 1
        self._soonest_s = min((pin.ends_s for pin in self._pins.values()), default=_FOREVER)

    def make_way(self, num_blocks: int, used: Iterable[BlockId]) -> bool:
        """Release pins for a request that needs `num_blocks` blocks in all. Returns whether a pin gave way.

        `used`: those of them that it shares with pins at no cost; blocks of windows never are.
        Only for a request that could not run beside the pins even if it were alone.
        """
        rest = self._blocks.pool.num_blocks - len(self._by_block)
        if num_blocks <= rest:
            return False
        own, gave_way = set(used), False
        for key, pin in list(self._pins.items()):
            if own.issuperset(pin.blocks):
                continue
            num_other = len(self._by_block) - len(self._by_block.keys() & own)
            if num_blocks <= self._blocks.pool.num_blocks - num_other:
                break
            self._give_way(key)
            gave_way = True
        return gave_way

    def invalidate(self, request: Request) -> None:
        """Release pins of the request's blocks, whose content may be invalid."""
        own = set(request.block_table)
        for key in [key for key, pin in self._pins.items() if not own.isdisjoint(pin.blocks)]:
            self._give_way(key)

    def references(self) -> list[BlockId]:
        """References that pins own, for audits."""
        return list(self._by_block)

    def totals(self) -> PinTotals:
        return PinTotals(
            num_pins=len(self._pins),
            num_blocks=len(self._by_block),
            max_blocks=self._bounds.max_blocks,
            made=self._made,
            renewed=self._renewed,
            refused=self._refused,
            gave_way=self._gave_way,
            expired=self._expired,
        )


def _count_down(counts: Counter[BlockId], block: BlockId) -> None:
    """Subtract one; what reaches zero is no longer counted."""
    counts[block] -= 1
    if not counts[block]:
        del counts[block]
