"""A worker's prefix cache as runs of blocks, hottest first, as a draining worker offers it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tandem.values.ids import BlockHash

MAX_CHAIN_NAMES = 65_536
"""Maximum number of names in one message: one MiB of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedChain:
    """Consecutive blocks of a prompt, without those that a hotter chain includes."""

    after: BlockHash
    """Parent of the first block: a block of an earlier chain, or the root of the chain of names."""
    from_root: bool
    names: tuple[BlockHash, ...]


def fitting(chains: Iterable[CachedChain], num_blocks: int) -> tuple[CachedChain, ...]:
    """The hottest chains, cut to `num_blocks` blocks; no kept block has a parent that was cut."""
    taken: list[CachedChain] = []
    for chain in chains:
        if num_blocks <= 0:
            break
        taken.append(chain if len(chain.names) <= num_blocks else replace(chain, names=chain.names[:num_blocks]))
        num_blocks -= len(chain.names)
    return tuple(taken)
