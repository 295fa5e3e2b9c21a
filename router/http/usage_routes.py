"""GET /v1/usage: what tenants have spent since the router began."""

from typing import Any

from starlette.requests import Request

from router.auth import ApiKeys
from router.tenant_usage import TenantUsage


class UsageRoutes:
    """The handler of the one route."""

    def __init__(self, usage: TenantUsage, keys: ApiKeys) -> None:
        self._usage = usage
        self._keys = keys

    async def show(self, request: Request) -> dict[str, Any]:
        """Totals of the key's own tenant; of all tenants for an operator, and where no keys are configured."""
        sees_all = self._keys.sees_all(request.headers.get("authorization"))
        return self._usage.object(await self._usage.collect(), only=None if sees_all else request.state.tenant)
