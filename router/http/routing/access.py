"""Access rules of routes: FastAPI dependencies that check API keys. Every route must have one.

A path is matched as it was sent: only the value of a path parameter may be percent-encoded. So each path has one
spelling, and any other is an unknown route, which requires a key like any other.
"""

from enum import Enum

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import RouteContext, iter_route_contexts
from fastapi.security.base import SecurityBase
from starlette.requests import Request

from router.access.api_keys import ANONYMOUS, KEY_HEADERS, ApiKeyStore
from router.access.audit_log import current_entry
from router.access.browser_guard import BrowserGuard
from tandem.config.access import RouterAccess
from tandem.errors import NotAllowed

SECURITY_SCHEME = "key"
_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)


class OperatorPage(Enum):
    """The pages that `router.operator_access` covers."""

    HEALTH = "health"
    READYZ = "readyz"
    METRICS = "metrics"
    VERSION = "version"
    OPENAPI = "openapi"
    PAGE = "page"


class AccessGuard:
    """Checks the key of a request against what its route requires."""

    def __init__(self, keys: ApiKeyStore, config: RouterAccess) -> None:
        self._keys = keys
        self._browsers = BrowserGuard.from_config(config)
        access = {page: config.operator_access.access_to(page.value, is_local=config.is_local) for page in OperatorPage}
        self._open = {page for page, who in access.items() if who == "open"}
        self._for_operators = {page for page, who in access.items() if who == "operator"}

    def is_open(self, page: OperatorPage) -> bool:
        """Whether the page needs no key."""
        return page in self._open

    def needs_key(self, page: OperatorPage | None) -> bool:
        """Whether a request for it is refused without a key now; None: clients' routes."""
        return self._keys.are_required and (page is None or page not in self._open)

    def admit(self, request: Request, page: OperatorPage | None = None) -> None:
        """Put the caller's tenant into the request's state. Raises Unauthenticated, NotAllowed."""
        if self._browsers is not None:
            self._browsers.check(request.scope["method"], request.scope["headers"])
        caller = ANONYMOUS
        if page is None or page not in self._open:
            entry = current_entry()
            if entry is not None:
                entry.is_kept = True
            sent: dict[str, str] = {}
            for name, value in request.scope["headers"]:
                if name in _KEY_HEADERS:
                    sent.setdefault(name.decode(), value.decode("latin-1"))
            caller = self._keys.authenticate(sent)
            if entry is not None:
                entry.caller = caller
            if page in self._for_operators and not caller.operator:
                raise NotAllowed(
                    f"{page.value}: for keys with `operator: true` (router.operator_access.{page.value});"
                    " GET /v1/usage has the figures of this key's own tenant"
                )
        # `request.state`, without starlette's objects around it.
        state = request.scope.setdefault("state", {})
        state["tenant"], state["sees_all"] = caller.tenant, caller.operator


class ClientAccess(SecurityBase):
    """A dependency of clients' routes: requires an API key where keys are configured."""

    page: OperatorPage | None = None

    def __init__(self, guard: AccessGuard) -> None:
        self.model = HTTPBearer()
        self.scheme_name = SECURITY_SCHEME
        self._guard = guard

    async def __call__(self, request: Request) -> None:
        self._guard.admit(request, self.page)


class PageAccess(ClientAccess):
    """A dependency of pages for operators and orchestrators, which have no keys: follows `router.operator_access`."""

    def __init__(self, guard: AccessGuard, page: OperatorPage) -> None:
        super().__init__(guard)
        self.page = page


def access_of(route: RouteContext) -> ClientAccess:
    """Return the one dependency that controls access to a route. Raises TypeError for a route without it."""
    dependant: Dependant | None = getattr(route, "dependant", None)
    calls = [] if dependant is None else [one.call for one in dependant.dependencies]
    found = [(place, call) for place, call in enumerate(calls) if isinstance(call, ClientAccess)]
    if [place for place, _ in found] != [0]:
        raise TypeError(f"{route.path}: the first dependency of a route must control access to it")
    return found[0][1]


def check_access(api: FastAPI) -> None:
    """Check that every route has an access rule. Raises TypeError."""
    for route in iter_route_contexts(api.routes):
        access_of(route)
