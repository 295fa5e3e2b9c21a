"""POST /debug/profile/router and /debug/profile/worker: for operators, where `profiling.enabled` is set.

Parameters are in the query, as for other pages that people open by hand. The answers are files.
"""

import asyncio
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from router.fleet.profiles import Profiles
from router.http.body.client_link import WhileConnected
from router.http.body.query_parameters import QueryParameters
from router.http.routing.access import ClientAccess
from tandem.errors import InvalidRequest, NotAllowed
from tandem.profiling.flame import flame_svg
from tandem.profiling.sampler import PERIOD_S
from tandem.profiling.stacks import StackTally, collapsed, speedscope

SECONDS, STEPS = 10.0, 20
STEPS_HEADER = "X-Tandem-Steps"
_NOT_KEPT = {"Cache-Control": "no-store"}


_TEXT = {"schema": {"type": "string"}}
_ROUTER_FILES = {
    "content": {"application/json": {"schema": {"type": "object"}}, "text/plain": _TEXT, "image/svg+xml": _TEXT}
}
_WORKER_FILE = {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
_Seconds = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]


class RouterProfileQuery(QueryParameters):
    seconds: _Seconds = SECONDS
    format: Literal["speedscope", "collapsed", "svg"] = "speedscope"


class WorkerProfileQuery(QueryParameters):
    worker: str | None = None
    """Id of a live worker, such as decode-0."""
    steps: Annotated[int, Field(gt=0, lt=10**9)] = STEPS
    seconds: _Seconds = SECONDS


class ProfileRoutes:
    """Path operations that profile the router and its workers, for operators."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access), Depends(_check_operator)])
        for path, profile, files in (
            ("/debug/profile/router", self.profile_router, _ROUTER_FILES),
            ("/debug/profile/worker", self.profile_worker, _WORKER_FILE),
        ):
            router.add_api_route(path, profile, methods=["POST"], response_class=Response, responses={200: files})
        return router

    async def profile_router(self, request: Request, query: Annotated[RouterProfileQuery, Query()]) -> Response:
        """Sample the router's stacks for some seconds, and return a file of them."""
        async with WhileConnected(request.scope, request.receive):
            tally = await self._profiles.of_router(query.seconds)
            title = f"router, {query.seconds:g} s, {tally.num_samples} samples"
            # Drawing many stacks takes long, and the loop has streams to serve.
            content, media_type = await asyncio.to_thread(_drawn, tally, query.format, title)
        return Response(content, headers=_NOT_KEPT, media_type=media_type)

    async def profile_worker(self, request: Request, query: Annotated[WorkerProfileQuery, Query()]) -> Response:
        """Record some steps of a worker, and return the trace that it made."""
        if query.worker is None:
            raise InvalidRequest("worker is required, such as ?worker=decode-0", param="worker")
        async with WhileConnected(request.scope, request.receive):
            trace = await self._profiles.of_worker(query.worker, num_steps=query.steps, seconds=query.seconds)
        headers = _NOT_KEPT | {STEPS_HEADER: str(trace.num_steps)}
        return Response(trace.content, headers=headers, media_type="application/gzip")


async def _check_operator(request: Request) -> None:
    if not request.state.sees_all:
        raise NotAllowed("profiles require an operator's key: they show the whole router")


def _drawn(tally: StackTally, shape: str, title: str) -> tuple[str | bytes, str]:
    """Draw the tally, and return it with its media type."""
    if shape == "svg":
        return flame_svg(tally, title=title), "image/svg+xml"
    if shape == "collapsed":
        return collapsed(tally), "text/plain; charset=utf-8"
    return orjson.dumps(speedscope(tally, name=title, period_s=PERIOD_S)), "application/json"
