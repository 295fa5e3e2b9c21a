"""Plans the fetch of a leaving worker's cache, in blocks of the fetching worker. Pure.

These blocks may be larger than the leaving worker's, so that one may begin in one chain of names and end in another;
they are counted along the path from the root, each in the chain in which it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import InvalidRequest
from tandem.protocol.chain_wire import chains_from_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.cached_chain import CachedChain
from tandem.values.ids import BlockHash
from tandem.values.prefix_holder import PrefixHolder, holder_from_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChain:
    """A cached chain, and the chain that it continues."""

    cached: CachedChain
    parent: int | None
    """Index of the chain that it continues; None at a root."""
    position: int
    """Number of the parent's names that come before it."""
    depth: int
    """Number of names between the root and its own first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """The cache that a leaving worker offers, as chains to fetch in order."""

    holder: PrefixHolder
    chains: tuple[PlannedChain, ...]
    """Hottest first, and each after the one that it continues."""
    block_size: int
    """Tokens per block of the leaving worker; there is one name for each."""
    own_block_size: int
    """Tokens per block of the fetching worker: a multiple of `block_size`."""
    own_max_blocks: int
    """Blocks in the longest prefix that the fetching worker can use."""
    prefill_tokens_per_s: float
    """Highest prefill rate of any worker; 0: unknown."""

    @property
    def _names_per_block(self) -> int:
        return self.own_block_size // self.block_size

    def num_blocks(self, index: int) -> int:
        """Number of own blocks that end in a chain."""
        chain = self.chains[index]
        return (chain.depth + len(chain.cached.names)) // self._names_per_block - chain.depth // self._names_per_block

    def num_usable(self, index: int) -> int:
        """Number of these that a prompt can have before its last token."""
        return min(
            self.num_blocks(index), max(0, self.own_max_blocks - self.chains[index].depth // self._names_per_block)
        )

    def num_names(self, index: int, num_blocks: int) -> int:
        """Number of a chain's names up to the end of its first `num_blocks` own blocks; all if these are all its
        blocks."""
        chain = self.chains[index]
        if num_blocks == self.num_blocks(index):
            return len(chain.cached.names)
        return max(0, (chain.depth // self._names_per_block + num_blocks) * self._names_per_block - chain.depth)

    def path(self, index: int, num_blocks: int) -> tuple[BlockHash, list[BlockHash]]:
        """The root, and the names of all hash blocks from there to the end of a chain's first `num_blocks` own blocks.

        Of the hash blocks inside one block only the last has a name here, which stands for all; the others are not
        looked up.
        """
        chain = self.chains[index]
        end = (chain.depth // self._names_per_block + num_blocks) * self._names_per_block
        parts = [chain.cached.names[: end - chain.depth]]
        while chain.parent is not None:
            position, chain = chain.position, self.chains[chain.parent]
            parts.append(chain.cached.names[:position])
        each = self.block_size // HASH_BLOCK_TOKENS
        return chain.cached.after, [name for part in reversed(parts) for name in part for _ in range(each)]


def plan_fetch(
    order: pb.FetchCache, *, own_block_size: int, own_max_tokens: int, own_prefill_tokens_per_s: float
) -> FetchPlan:
    """Plan the fetch for `order`; `own_*` are the fetching worker's values, its rate 0 while unknown.

    Raises InvalidRequest.
    """
    if not order.HasField("holder") or not order.holder.address:
        raise InvalidRequest("holder needs worker_id and address", param="holder")
    if order.block_size % HASH_BLOCK_TOKENS or not order.block_size or own_block_size % order.block_size:
        raise InvalidRequest(
            f"blocks of {order.block_size} tokens do not make up blocks of {own_block_size}", param="block_size"
        )
    return FetchPlan(
        holder=holder_from_pb(order.holder),
        chains=_placed(chains_from_pb(order.chains)),
        block_size=order.block_size,
        own_block_size=own_block_size,
        own_max_blocks=own_max_tokens // own_block_size,
        prefill_tokens_per_s=own_prefill_tokens_per_s or order.prefill_tokens_per_s,
    )


def _placed(chains: Sequence[CachedChain]) -> tuple[PlannedChain, ...]:
    at = {name: (i, j) for i, chain in enumerate(chains) for j, name in enumerate(chain.names, start=1)}
    placed: list[PlannedChain] = []
    for chain in chains:
        if chain.from_root:
            placed.append(PlannedChain(cached=chain, parent=None, position=0, depth=0))
        else:
            parent, position = at[chain.after]
            depth = placed[parent].depth + position
            placed.append(PlannedChain(cached=chain, parent=parent, position=position, depth=depth))
    return tuple(placed)
