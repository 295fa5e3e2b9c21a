"""A worker's prefix cache as runs of blocks, hottest first: what a draining worker offers when it leaves."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tandem.values.ids import BlockHash

MAX_CHAIN_NAMES = 65_536
"""Names in one message: a MiB of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedChain:
    """Blocks that follow one another in a prompt, without those that a hotter chain has named already."""

    after: BlockHash
    """The block that the first one follows, which an earlier chain names; or the root of the chain of names."""
    from_root: bool
    names: tuple[BlockHash, ...]


def fitting(chains: Iterable[CachedChain], num_blocks: int) -> tuple[CachedChain, ...]:
    """The hottest, cut to so many blocks. What is left out has nothing hanging on it that is not left out too."""
    taken: list[CachedChain] = []
    for chain in chains:
        if num_blocks <= 0:
            break
        taken.append(chain if len(chain.names) <= num_blocks else replace(chain, names=chain.names[:num_blocks]))
        num_blocks -= len(chain.names)
    return tuple(taken)
