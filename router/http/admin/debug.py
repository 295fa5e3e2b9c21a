"""Debugging routes: a tenant's last placements, and its pinned prefixes."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request

from router.http.body.answer_object import AnswerObject, AnyObject, Count
from router.http.body.query_parameters import QueryParameters
from router.http.routing.access import ClientAccess
from router.placement.decision_log import DecisionLog
from router.workers.prefix_pins import PinRegistry

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
_MAX_ID_CHARS = 256


class DebugList(AnswerObject):
    object: Literal["list"]
    data: list[AnyObject]


class DecisionList(DebugList):
    kept: Count


class DecisionQuery(QueryParameters):
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    request_id: Annotated[str | None, Field(max_length=_MAX_ID_CHARS)] = None


class DecisionRoutes:
    """The path operation of /debug/decisions."""

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions
        self._one_at_a_time = asyncio.Lock()

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/debug/decisions", self.list_decisions, methods=["GET"], response_model=DecisionList)
        return router

    async def list_decisions(self, request: Request, query: Annotated[DecisionQuery, Query()]) -> dict[str, Any]:
        """List the tenant's last placements, newest first; those of one request where `request_id` names it."""
        tenant = request.state.tenant
        async with self._one_at_a_time:
            # Takes milliseconds: yield between concurrent callers, so that streams are served.
            await asyncio.sleep(0)
            shown = self._decisions.described(tenant, limit=query.limit, request_id=query.request_id)
        return {"object": "list", "kept": self._decisions.num_kept(tenant), "data": shown}


class PinRoutes:
    """The path operation of /debug/pins."""

    def __init__(self, pins: PinRegistry) -> None:
        self._pins = pins

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/debug/pins", self.list_pins, methods=["GET"], response_model=DebugList)
        return router

    async def list_pins(self, request: Request) -> dict[str, Any]:
        """List the tenant's pinned prefixes that this router process knows of, the most recently used first."""
        shown = [
            {
                "name": name,
                "worker": record.worker.worker_id,
                "outcome": "asked" if record.outcome is None else record.outcome.value,
                "num_tokens": record.num_tokens,
                "ends_in_s": round(left_s, 3),
            }
            for name, record, left_s in self._pins.of_tenant(request.state.tenant)
        ]
        return {"object": "list", "data": shown[:MAX_LIMIT]}
