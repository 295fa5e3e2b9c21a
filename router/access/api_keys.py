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
"""Headers in which clients of other vendors' APIs send a key."""
KEY_HEADERS = frozenset({"authorization", *_BARE_HEADERS})
"""All headers in which a key may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCaller:
    """The caller of a request, as its API key identifies it."""

    tenant: str
    key_id: str | None
    """Identifier of the key in logs; None where no key is required."""
    operator: bool
    """Whether the caller may see other tenants' usage."""


ANONYMOUS = ApiCaller(tenant="", key_id=None, operator=True)
"""The caller of every request where no keys are configured."""


_NONE = (b"", ANONYMOUS)
"""Compared with when no entry matches: no digest is empty."""


class ApiKeyStore:
    """The API keys in force. Without any, every caller is the one unnamed tenant."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._known: dict[bytes, tuple[bytes, ApiCaller]] = {}
        self._nameless: frozenset[str] = frozenset()
        self.lapsed: Callable[[], str | None] | None = None
        """Returns why no key is accepted any more (revocations can no longer be read); None while keys are accepted.
        None itself where keys cannot lapse."""
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Accept these keys, and no others, from now on."""
        # Of several entries with the same key, the first counts.
        known = {one.kept: one for one in reversed(list(keys))}
        self._known = {kept: (kept, _caller(one)) for kept, one in known.items()}
        self._nameless |= {_caller(one).tenant for one in known.values() if one.tenant is None}

    @property
    def are_required(self) -> bool:
        """Whether a key is required, that is, whether any is configured."""
        return bool(self._known)

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants of the keys in force."""
        return frozenset(caller.tenant for _, caller in self._known.values()) or frozenset({""})

    def is_nameless(self, tenant: str) -> bool:
        """Whether the tenant has no name and is identified by its key's digest; also true of keys no longer
        accepted."""
        return tenant in self._nameless

    def tenant(self, authorization: str | None) -> str:
        """Return the tenant that an Authorization value proves, "" when no key is required. Raises Unauthenticated."""
        return self.authenticate({} if authorization is None else {"authorization": authorization}).tenant

    def authenticate(self, headers: Mapping[str, str]) -> ApiCaller:
        """Return the caller that the headers (lowercase names) prove.

        Raises Unauthenticated, or Unavailable while no key is accepted.
        """
        if self.lapsed is not None and (reason := self.lapsed()) is not None:
            # The client's key may well be valid, so the answer must not claim otherwise.
            raise Unavailable(reason, retry_after_s=_LAPSED_RETRY_S)
        if not self._known:
            return ANONYMOUS
        given = _credential(headers)
        kept = hashed(given)
        # One dictionary lookup, however many keys there are. Its time may depend on the digest of what was sent, but
        # never on the key itself: a client cannot choose a digest, and a digest close to that of a valid key (should
        # timing reveal that, despite the dictionary's secret hash) says nothing about which key to guess next.
        known, caller = self._known.get(kept, _NONE)
        if not (hmac.compare_digest(kept, known) and given):
            how = "send an API key as `Authorization: Bearer KEY`"
            raise Unauthenticated("unknown API key" if given else how)
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
