"""A digest by which two requests are known to be equal."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def request_digest(prompt_token_ids: Sequence[int], *parts: object) -> bytes:
    """Return a digest of what identifies a request; the `repr` of each part must be complete.

    It is computed on the event loop, for prompts that may be long: token ids are hashed from memory as they are.
    """
    digest = blake2b("\0".join(map(repr, (len(prompt_token_ids), *parts))).encode(), digest_size=DIGEST_BYTES)
    digest.update(array("i", prompt_token_ids))
    return digest.digest()
