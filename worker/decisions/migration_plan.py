"""The cache that a leaving worker offers, counted in blocks of the worker that fetches it. Pure.

Those blocks may be larger than the leaver's: then one of them may begin in one run of names and end in another, so they
are counted along the path from the root, each in the run in which it ends.
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
class Run:
    """A chain, with its place among the others."""

    chain: CachedChain
    parent: int | None
    """The run that it continues; None at a root."""
    position: int
    """Names of the parent that come before it."""
    depth: int
    """Names between the root and its own first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What a leaving worker offers, as runs to fetch in order."""

    holder: PrefixHolder
    runs: tuple[Run, ...]
    """Hottest first, and each after the one that it continues."""
    block_size: int
    """Tokens of the blocks that the names are of."""
    own_block_size: int
    """Tokens of the fetching worker's blocks: a multiple."""
    own_max_blocks: int
    """In the longest prefix that the fetching worker has a use for."""
    prefill_tokens_per_s: float
    """The fastest that any worker computes at; 0: unknown."""

    @property
    def _names_per_block(self) -> int:
        return self.own_block_size // self.block_size

    def num_blocks(self, index: int) -> int:
        """Own blocks that end in a run."""
        run = self.runs[index]
        return (run.depth + len(run.chain.names)) // self._names_per_block - run.depth // self._names_per_block

    def num_usable(self, index: int) -> int:
        """Those that some prompt may have before it."""
        return min(
            self.num_blocks(index), max(0, self.own_max_blocks - self.runs[index].depth // self._names_per_block)
        )

    def num_names(self, index: int, num_blocks: int) -> int:
        """Names of a run that the first so many own blocks in it reach; all of them when that is every block."""
        run = self.runs[index]
        if num_blocks == self.num_blocks(index):
            return len(run.chain.names)
        return max(0, (run.depth // self._names_per_block + num_blocks) * self._names_per_block - run.depth)

    def path(self, index: int, num_blocks: int) -> tuple[BlockHash, list[BlockHash]]:
        """The root, and the names of all hash blocks from there to the end of the first so many own blocks in a run.

        Of the hash blocks inside one block only the last has a name here; nobody asks for the others.
        """
        run = self.runs[index]
        end = (run.depth // self._names_per_block + num_blocks) * self._names_per_block
        parts = [run.chain.names[: end - run.depth]]
        while run.parent is not None:
            position, run = run.position, self.runs[run.parent]
            parts.append(run.chain.names[:position])
        each = self.block_size // HASH_BLOCK_TOKENS
        return run.chain.after, [name for part in reversed(parts) for name in part for _ in range(each)]


def plan_migration(
    order: pb.Inherit, *, own_block_size: int, own_max_tokens: int, own_prefill_tokens_per_s: float
) -> MigrationPlan:
    """`own_*`: of the worker that is to fetch; its longest prefix, and its rate, 0 while unknown.

    Raises InvalidRequest.
    """
    if not order.HasField("holder") or not order.holder.address:
        raise InvalidRequest("holder needs worker_id and address", param="holder")
    if order.block_size % HASH_BLOCK_TOKENS or not order.block_size or own_block_size % order.block_size:
        raise InvalidRequest(
            f"blocks of {order.block_size} tokens do not make up blocks of {own_block_size}", param="block_size"
        )
    return MigrationPlan(
        holder=holder_from_pb(order.holder),
        runs=_placed(chains_from_pb(order.chains)),
        block_size=order.block_size,
        own_block_size=own_block_size,
        own_max_blocks=own_max_tokens // own_block_size,
        prefill_tokens_per_s=own_prefill_tokens_per_s or order.prefill_tokens_per_s,
    )


def _placed(chains: Sequence[CachedChain]) -> tuple[Run, ...]:
    at = {name: (i, j) for i, chain in enumerate(chains) for j, name in enumerate(chain.names, start=1)}
    runs: list[Run] = []
    for chain in chains:
        if chain.from_root:
            runs.append(Run(chain=chain, parent=None, position=0, depth=0))
        else:
            parent, position = at[chain.after]
            runs.append(Run(chain=chain, parent=parent, position=position, depth=runs[parent].depth + position))
    return tuple(runs)
