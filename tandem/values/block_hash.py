"""Content names of KV blocks.

A block's name is a chained hash keyed with the cluster secret: it covers the model revision, the adapter, the tenant's
salt and every token up to the end of the block. Two workers that hold the same name hold the same tokens' KV, whatever
their dtype or tensor parallelism; without the secret, names cannot be forged, nor guesses of another client's prompt be
tested against them (cf. CVE-2025-46570).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tandem.values.ids import BlockHash

HASH_BLOCK_TOKENS = 16
"""Tokens per hash block; a physical block holds a whole number of these."""

HASH_BYTES = 16
MIN_SECRET_CHARS = 16
MAX_SECRET_BYTES = 64
"""Maximum size of a BLAKE2b key (RFC 7693)."""


def secret_problem(secret: str) -> str | None:
    """The mistake in a secret, to follow its name in a sentence; None when there is none. Never shows the secret."""
    bounds = f"it must have at least {MIN_SECRET_CHARS} characters and at most {MAX_SECRET_BYTES} bytes"
    if (num_chars := len(secret.strip())) < MIN_SECRET_CHARS:
        return f"has {num_chars} characters besides surrounding spaces; {bounds}"
    if (num_bytes := len(secret.encode())) > MAX_SECRET_BYTES:
        return f"has {num_bytes} bytes; {bounds}"
    return None


def root_hash(*, secret: bytes, model_fingerprint: str, adapter: str = "", salt: str = "") -> BlockHash:
    """The parent of every first block; it binds a chain to one model, adapter and tenant.

    The parts are length-prefixed so that different tuples never feed the hash the same bytes. Raises ValueError for a
    secret beyond MAX_SECRET_BYTES.
    """
    digest = blake2b(key=secret, digest_size=HASH_BYTES, person=b"tandem-kv-root")
    for part in (model_fingerprint, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return BlockHash(digest.digest())


class BlockHasher:
    """Extends chains of block names under one cluster secret."""

    __slots__ = ("_seeded",)

    tokens_per_name = HASH_BLOCK_TOKENS
    """Larger only in a simulator, whose names are not hashes."""

    def __init__(self, secret: bytes) -> None:
        # Keying takes one compression; a copy of a keyed state saves it for every block.
        self._seeded = blake2b(key=secret, digest_size=HASH_BYTES, person=b"tandem-kv-block")

    def child(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """Name of the block that holds `tokens` (exactly one hash block) after `parent`."""
        digest = self._seeded.copy()
        digest.update(parent)
        digest.update(array("i", tokens).tobytes())
        return BlockHash(digest.digest())

    def extend(self, root: BlockHash, chain: list[BlockHash], tokens: Sequence[int]) -> None:
        """Append to `chain` the names of all full blocks of `tokens` that it does not yet hold."""
        first, end = len(chain) * HASH_BLOCK_TOKENS, len(tokens) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        if first >= end:
            return
        # As `child`, with the tokens turned into bytes once.
        new, parent = array("i", tokens[first:end]), chain[-1] if chain else root
        data, size, seeded = new.tobytes(), new.itemsize * HASH_BLOCK_TOKENS, self._seeded
        for start in range(0, len(data), size):
            digest = seeded.copy()
            digest.update(parent + data[start : start + size])
            parent = BlockHash(digest.digest())
            chain.append(parent)
