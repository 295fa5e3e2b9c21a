"""Whole blocks that a step moves before it computes: plain values that the scheduler decides on and a runner executes.

The three groups of one batch are executed in the order offloads, loads, copies. Within a group no two moves share a
destination, and no source is another's destination, so a group may run in any order or all at once.
"""

from typing import NamedTuple

from tandem.values.ids import BlockId


class BlockOffload(NamedTuple):
    """Save a block's content outside the pool: the block may be overwritten by the same batch."""

    source: BlockId
    slot: int
    """Place in the tier, from 0."""


class BlockLoad(NamedTuple):
    """Bring saved content back into a block of the pool."""

    slot: int
    target: BlockId


class BlockCopy(NamedTuple):
    """Give a request its own copy of a block that others share and that it is about to write into."""

    source: BlockId
    target: BlockId
