"""API keys of the public doors, and the tenant that a key stands for."""

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from pydantic import SecretStr

from tandem.errors import Unauthenticated

_SCHEME = "bearer"


class ApiKeys:
    """Bearer keys. With none configured everybody is the one nameless tenant."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._keys = tuple(key.get_secret_value().encode() for key in keys)

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an Authorization value proves: a digest of its key, "" when no key is asked for.

        Raises Unauthenticated.
        """
        if not self._keys:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape")
        # All keys are compared, each in constant time: the time says nothing about which one was near.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        if scheme.lower() != _SCHEME or not any(known):
            raise Unauthenticated("send an API key as `Authorization: Bearer KEY`")
        return blake2b(given, digest_size=16, person=b"tandem-tenant").hexdigest()
