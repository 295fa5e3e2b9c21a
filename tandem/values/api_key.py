"""Generates and hashes API keys: a key is random, and only its SHA-256 is kept.

Generated keys have 256 random bits, which cannot be guessed. A deliberately slow hash would therefore protect nothing
more, and would let clients with wrong keys keep the servers busy. For the same reason, keys that a person made up
should not be used.
"""

import hashlib
import re
import secrets

DIGEST_PREFIX = "sha256:"
_KEY_PREFIX = "tandem-"
_RANDOM_BYTES = 32
_ID_CHARS = 12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """Generate a random key, in the clear."""
    return _KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def is_digest(text: str) -> bool:
    """Whether a configured value is meant as a digest, well-formed or not."""
    return text.startswith(DIGEST_PREFIX)


def is_well_formed(text: str) -> bool:
    """Whether such a digest has the right form."""
    return _DIGEST.fullmatch(text) is not None


def hashed(key: bytes) -> bytes:
    """The hash that is kept of a key."""
    return hashlib.sha256(key).digest()


def entry_of(key: str) -> str:
    """The configuration's form of the hash: `sha256:` and its digits."""
    return DIGEST_PREFIX + hashed(key.encode()).hex()


def kept_of(entry: str) -> bytes:
    """The hash of a configured value, which is a digest or a key in the clear."""
    return bytes.fromhex(entry.removeprefix(DIGEST_PREFIX)) if is_digest(entry) else hashed(entry.encode())


def key_id(kept: bytes) -> str:
    """Id of a key in logs: enough to distinguish keys, and useless for authentication."""
    return kept.hex()[:_ID_CHARS]
