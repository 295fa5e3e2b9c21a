"""Brings more of a prefix up from the tiers below the pool between steps, for peers, which wait for no batch. Pure."""

from enum import Enum

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.tiers.cache import CacheTiers
from engine.types.block_moves import BlockLoad
from engine.types.request import Request


class Promotion(Enum):
    """Result of one call of `promote`."""

    DONE = "done"
    """Nothing more can be brought up."""
    MORE = "more"
    """Blocks were brought up, and more may follow."""
    WAIT = "wait"
    """Blocks are being read from disk: call again later."""


def promote_promised(blocks: BlockManager, tiers: CacheTiers, request: Request, count: int) -> None:
    """Lengthen the request's table by `count` promised blocks, and index them.

    They are loaded as counted by `CacheTiers.num_loadable_blocks`. The rest of the request's blocks count as missed.
    """
    _promote_slice(blocks, tiers, request, count)
    tiers.record_misses(request, len(request.block_table))


def _promote_slice(blocks: BlockManager, tiers: CacheTiers, request: Request, count: int) -> None:
    found = len(request.block_table)
    places = tiers.pin_for_load(request, found, count)
    if not count:
        return
    targets = blocks.allocate_promised(count)
    blocks.grow(request, targets)
    tiers.load_now(list(map(BlockLoad, places, targets)))
    request.num_computed_tokens = (found + count) * blocks.block_size
    blocks.release(blocks.index_computed(request, found))


def promote(
    blocks: BlockManager, tiers: CacheTiers, request: Request, *, now: float, max_blocks: int, spare_blocks: int
) -> Promotion:
    """Bring up at most `max_blocks` blocks that follow the request's table, leaving `spare_blocks` available.

    Blocks on disk are read first, where that takes less time than computing. Blocks found nowhere are counted as missed
    once, at the end.
    """
    tiers.collect()
    found = len(request.block_table)
    if tiers.must_wait(request, found, now):
        return Promotion.WAIT
    num_loadable = tiers.num_loadable_blocks(request, found, between_steps=True)
    count = min(num_loadable, max_blocks, max(0, blocks.num_available - spare_blocks))
    if not count:
        tiers.drop(request.request_id)
        tiers.record_misses(request, found)
        return Promotion.DONE
    blocks.promise(count)
    _promote_slice(blocks, tiers, request, count)
    return Promotion.MORE
