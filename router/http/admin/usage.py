"""GET /v1/usage: what tenants have spent since the router began."""

from typing import Any

from starlette.requests import Request

from router.tenants.usage import TenantUsage


class UsageRoutes:
    """The handler of the one route."""

    def __init__(self, usage: TenantUsage) -> None:
        self._usage = usage

    async def show(self, request: Request) -> dict[str, Any]:
        """Totals of the key's own tenant; of all tenants for an operator, and where no keys are configured."""
        only = None if request.state.sees_all else request.state.tenant
        return self._usage.object(await self._usage.collect(), only=only)
