"""Who may come to which route. Every route says for whom it is; there is no way to add one that does not.

A path is looked up as it was sent: only below a route that ends in `/*` may anything be percent-encoded. So there is
one spelling of each path, and what is spelled otherwise is no route, for which a key is asked like for any other.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.access.api_keys import NOBODY, ApiCaller, ApiKeyStore
from router.access.audit_log import current_entry
from tandem.config.access import RouterAccess
from tandem.errors import NotAllowed

Handler = Callable[[Request], Awaitable[Response | dict[str, Any]]]


class OperatorPage(Enum):
    """What `router.operator_access` speaks of."""

    HEALTH = "health"
    READYZ = "readyz"
    METRICS = "metrics"
    VERSION = "version"
    OPENAPI = "openapi"
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class Guarded:
    """A handler, and for whom it is."""

    handler: Handler
    page: OperatorPage | None
    """None: for clients."""


def public(handler: Handler) -> Guarded:
    """For clients: with a key, where there are keys."""
    return Guarded(handler, None)


def operator(handler: Handler, page: OperatorPage) -> Guarded:
    """For who runs the cluster, and for orchestrators, which have no keys: as `router.operator_access` says."""
    return Guarded(handler, page)


class Guard:
    """Asks for keys."""

    def __init__(self, keys: ApiKeyStore, locks: RouterAccess) -> None:
        self._keys = keys
        access = {page: locks.operator_access.access_to(page.value, is_local=locks.is_local) for page in OperatorPage}
        self._open = {page for page, who in access.items() if who == "open"}
        self._for_operators = {page for page, who in access.items() if who == "operator"}

    def is_open(self, page: OperatorPage) -> bool:
        """Whether nobody is asked there."""
        return page in self._open

    def admit(self, request: Request, route: Guarded | None) -> ApiCaller:
        """Who asks for the route, or for none that there is. Raises Unauthenticated, NotAllowed."""
        if route is not None and route.page is not None and self.is_open(route.page):
            return NOBODY
        entry = current_entry()
        if entry is not None:
            entry.is_kept = True
        caller = self._keys.caller(request.headers)
        if entry is not None:
            entry.caller = caller
        if route is not None and route.page in self._for_operators and not caller.operator:
            raise NotAllowed(
                f"{route.page.value}: for keys with `operator: true` (router.operator_access.{route.page.value});"
                " GET /v1/usage has the figures of this key's own tenant"
            )
        return caller
