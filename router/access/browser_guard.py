"""Keeps web pages of other origins away from a router that asks for no API key.

A browser sends whatever a page asks for: a form or `fetch` without CORS posts to any address, and a name of the page's
own that comes to resolve to loopback (DNS rebinding) makes this router the page's own origin. A page cannot know an API
key, and browsers add none by themselves, so where keys are required there is nothing to check. Pure.
"""

from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from tandem.config.access import RouterAccess
from tandem.errors import NotAllowed
from tandem.rpc.hosts import is_loopback

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, and whose answers a page of another origin cannot read."""
_OWN_SITES = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site` for requests by this router's own pages, and for addresses that a user typed."""
_MAX_KNOWN_HOSTS = 256


class BrowserGuard:
    """Refuses requests for names that are not this router's, and those that pages of other origins send."""

    def __init__(self, origins: Collection[str], *, any_host: bool = False) -> None:
        """`origins`: of pages that may use the router. `any_host`: it may be called by any name."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._names = frozenset(urlsplit(origin).hostname or "" for origin in origins)
        self._any_host = any_host
        self._known_hosts: set[bytes] = set()
        """Values of Host, ports included, that were found good."""

    @classmethod
    def from_config(cls, config: RouterAccess) -> "BrowserGuard | None":
        """The guard of a router; None where API keys are required."""
        if config.api_keys or config.api_keys_file is not None:
            return None
        # Beyond loopback a router has names that it does not know; in TLS a foreign name does not fit its certificate.
        return cls(config.allowed_origins, any_host=not config.is_local or config.tls is not None)

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """`headers`: names in small letters. Raises NotAllowed that names the header."""
        sent = dict(headers)
        host = sent.get(b"host")
        if host is not None and not self._any_host and host not in self._known_hosts:
            self._check_host(host)
        if method in _SAFE_METHODS:
            return
        origin = sent.get(b"origin")
        if origin is None:
            # Browsers of before 2020 leave Origin out of some requests; what is no browser sends neither.
            if sent.get(b"sec-fetch-site", b"none") not in _OWN_SITES:
                raise _refused_origin("Sec-Fetch-Site")
        elif origin not in self._origins and not _is_same(origin, host):
            raise _refused_origin("Origin")

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1").strip().lower()
        name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
        name = name.removesuffix(".")
        # No browser asks a name server for names below localhost (RFC 6761, 6.3).
        if not (name in self._names or name.endswith(".localhost") or is_loopback(name)):
            raise NotAllowed(
                f"Host: {name[:100]!r} is not a loopback name, and without API keys this router answers to no other;"
                " set router.api_keys, or list the origin of its page in router.allowed_origins",
                param="Host",
            )
        if len(self._known_hosts) < _MAX_KNOWN_HOSTS:
            self._known_hosts.add(host)


def _is_same(origin: bytes, host: bytes | None) -> bool:
    """Whether the page came from this very host. TLS may end in a proxy, so the scheme says nothing."""
    scheme, _, rest = origin.partition(b"://")
    return scheme in (b"http", b"https") and rest == host


def _refused_origin(header: str) -> NotAllowed:
    return NotAllowed(
        f"{header}: pages of other origins may not use this router, which has no API keys; set router.api_keys, or list"
        " the page's origin in router.allowed_origins",
        param=header,
    )
