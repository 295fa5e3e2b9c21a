"""API keys of the public servers, and the tenant that a key stands for."""

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from tandem.config.admission import ApiKey
from tandem.errors import Unauthenticated, Unavailable
from tandem.values.api_key import hashed, key_id

_SCHEME = "bearer"
_LAPSED_RETRY_S = 5.0
_BARE_HEADERS = ("x-api-key", "x-goog-api-key")
"""Where clients of other makers' APIs put a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCaller:
    """Who sends a request."""

    tenant: str
    key_id: str | None
    """What logs call the key; None where no key is required."""
    operator: bool
    """May see what other tenants use."""


NOBODY = ApiCaller(tenant="", key_id=None, operator=True)
"""Everybody, where nobody has a key."""


_NONE = (b"", NOBODY)
"""Compared with in place of an entry: no digest is empty."""


class ApiKeyStore:
    """The keys that are good now. With none at all everybody is the one nameless tenant."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._known: dict[bytes, tuple[bytes, ApiCaller]] = {}
        self._nameless: frozenset[str] = frozenset()
        self.lapsed: Callable[[], str | None] = lambda: None
        """Why none of them is good any more, if so: nobody knows which have been revoked meanwhile."""
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Accept these keys and no others from now on."""
        # Of entries of the same key the first counts.
        known = {one.kept: one for one in reversed(list(keys))}
        self._known = {kept: (kept, _caller(one)) for kept, one in known.items()}
        self._nameless |= {_caller(one).tenant for one in known.values() if one.tenant is None}

    @property
    def are_required(self) -> bool:
        """Whether a key is required, because there are any."""
        return bool(self._known)

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants of the keys in force."""
        return frozenset(caller.tenant for _, caller in self._known.values()) or frozenset({""})

    def is_nameless(self, tenant: str) -> bool:
        """Whether it is called by a key's digest, for want of a name; also of a key that is not good any more."""
        return tenant in self._nameless

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an Authorization value proves, "" when no key is required. Raises Unauthenticated."""
        return self.caller({} if authorization is None else {"authorization": authorization}).tenant

    def caller(self, headers: Mapping[str, str]) -> ApiCaller:
        """The caller that headers, by their names in small letters, prove.

        Raises Unauthenticated; Unavailable while no key is good.
        """
        if (reason := self.lapsed()) is not None:
            # The client's key may well be good, so it must not read that it is not.
            raise Unavailable(reason, retry_after_s=_LAPSED_RETRY_S)
        if not self._known:
            return NOBODY
        given = _credential(headers)
        kept = hashed(given)
        # One look, however many keys there are. Its time may depend on the digest of what was sent, never on the key
        # itself: whoever sends cannot choose a digest, and one that is near a good key's (should time tell that, behind
        # the dictionary's own secret hash) says nothing of where the next guess had better be.
        known, caller = self._known.get(kept, _NONE)
        if not (hmac.compare_digest(kept, known) and given):
            how = "send an API key as `Authorization: Bearer KEY`"
            raise Unauthenticated("this API key is not known here" if given else how)
        return caller


def _credential(headers: Mapping[str, str]) -> bytes:
    """Return the key that was sent; empty when there is none."""
    if (authorization := headers.get("authorization")) is not None:
        scheme, _, key = authorization.partition(" ")
        sent = key if scheme.lower() == _SCHEME else ""
    else:
        sent = next((headers[name] for name in _BARE_HEADERS if name in headers), "")
    return sent.strip().encode("utf-8", "surrogateescape")


def _caller(key: ApiKey) -> ApiCaller:
    tenant = key.tenant or blake2b(key.kept, digest_size=16, person=b"tandem-tenant").hexdigest()
    return ApiCaller(tenant=tenant, key_id=key_id(key.kept), operator=key.operator)
