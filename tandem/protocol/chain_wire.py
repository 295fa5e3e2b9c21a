"""Converts chains of cached blocks to and from protobuf, for both ends of a session."""

from collections.abc import Iterable, Sequence

from tandem.errors import InvalidRequest
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BYTES
from tandem.values.cached_chain import MAX_CHAIN_NAMES, CachedChain
from tandem.values.ids import BlockHash


def chains_to_pb(chains: Iterable[CachedChain]) -> list[pb.CachedChain]:
    return [
        pb.CachedChain(after=chain.after, from_root=chain.from_root, names=b"".join(chain.names)) for chain in chains
    ]


def chains_from_pb(messages: Sequence[pb.CachedChain]) -> tuple[CachedChain, ...]:
    """Decode chains. Raises InvalidRequest for too many names, incomplete names, or a block of unknown parent."""
    known: set[BlockHash] = set()
    num_names = 0
    chains: list[CachedChain] = []
    for message in messages:
        count, rest = divmod(len(message.names), HASH_BYTES)
        if rest or not count or len(message.after) != HASH_BYTES:
            raise InvalidRequest(f"names of {HASH_BYTES} bytes were expected", param="chains")
        num_names += count
        if num_names > MAX_CHAIN_NAMES:
            raise InvalidRequest(f"chains must have at most {MAX_CHAIN_NAMES} names, got {num_names}", param="chains")
        after = BlockHash(message.after)
        if not message.from_root and after not in known:
            raise InvalidRequest("a chain continues a block that was not named", param="chains")
        names = tuple(BlockHash(message.names[i : i + HASH_BYTES]) for i in range(0, len(message.names), HASH_BYTES))
        known.update(names)
        if len(known) != num_names:
            raise InvalidRequest("a block is named twice", param="chains")
        chains.append(CachedChain(after=after, from_root=message.from_root, names=names))
    return tuple(chains)
