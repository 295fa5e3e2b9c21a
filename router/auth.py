"""API keys of the public doors, and the tenant that a key stands for."""

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from tandem.admission_config import ApiKey
from tandem.errors import Unauthenticated

_SCHEME = "bearer"


class ApiKeys:
    """Bearer keys. With none configured everybody is the one nameless tenant."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        secrets = [one.key.get_secret_value().encode() for one in keys]
        self._keys = tuple(
            (secret, one.tenant or blake2b(secret, digest_size=16, person=b"tandem-tenant").hexdigest(), one.operator)
            for secret, one in zip(secrets, keys, strict=True)
        )

    @property
    def tenants(self) -> frozenset[str]:
        """All that there are."""
        return frozenset(tenant for _, tenant, _ in self._keys) or frozenset({""})

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an Authorization value proves, "" when no key is asked for.

        It is the name that the configuration gives it, or else a digest of its key. Raises Unauthenticated.
        """
        return self._proven(authorization)[0]

    def sees_all(self, authorization: str | None) -> bool:
        """Whether it may see what other tenants use: with an operator's key, or where no key is asked for.

        Raises Unauthenticated.
        """
        return self._proven(authorization)[1]

    def _proven(self, authorization: str | None) -> tuple[str, bool]:
        if not self._keys:
            return "", True
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape")
        # All keys are compared, each in constant time: the time says nothing about which one was near.
        found = [(tenant, operator) for known, tenant, operator in self._keys if hmac.compare_digest(given, known)]
        if scheme.lower() != _SCHEME or not given or not found:
            raise Unauthenticated("send an API key as `Authorization: Bearer KEY`")
        return found[0]
