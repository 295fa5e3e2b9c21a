"""POST /debug/profile/router and /debug/profile/worker: for operators, where `profiling.enabled` is set.

Parameters stand in the address, as those of other pages for people who look. The answers are files.
"""

import asyncio

import orjson
from starlette.requests import Request
from starlette.responses import Response

from router.fleet.profiles import Profiles
from router.http.body.client_link import WhileConnected
from tandem.errors import InvalidRequest, NotAllowed
from tandem.profiling.flame import flame_svg
from tandem.profiling.sampler import PERIOD_S
from tandem.profiling.stacks import StackTally, collapsed, speedscope

SECONDS, STEPS = 10.0, 20
_MAX_CHARS = 32
STEPS_HEADER = "X-Tandem-Steps"
_NOT_KEPT = {"Cache-Control": "no-store"}


class ProfileRoutes:
    """Both."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles

    async def router(self, request: Request) -> Response:
        """`?seconds=`, and `?format=` speedscope, collapsed or svg. Raises NotAllowed, InvalidRequest, Overloaded."""
        asked = _parameters(request, {"seconds", "format"})
        shape = asked.get("format", "speedscope")
        if shape not in ("speedscope", "collapsed", "svg"):
            raise InvalidRequest("format must be speedscope, collapsed or svg", param="format")
        seconds = _number(asked, "seconds", SECONDS)
        async with WhileConnected(request.scope, request.receive):
            tally = await self._profiles.of_router(seconds)
            title = f"router, {seconds:g} s, {tally.num_samples} samples"
            # Many stacks take long to draw, and the loop has streams to serve.
            content, media_type = await asyncio.to_thread(_drawn, tally, shape, title)
        return Response(content, headers=_NOT_KEPT, media_type=media_type)

    async def worker(self, request: Request) -> Response:
        """`?worker=`, `?steps=`, `?seconds=`. Raises NotAllowed, InvalidRequest, Overloaded, Unavailable."""
        asked = _parameters(request, {"worker", "steps", "seconds"})
        worker_id, steps = asked.get("worker"), _number(asked, "steps", STEPS)
        if worker_id is None:
            raise InvalidRequest("say which worker, such as ?worker=decode-0", param="worker")
        if steps != int(steps):
            raise InvalidRequest("steps must be an integer", param="steps")
        seconds = _number(asked, "seconds", SECONDS)
        async with WhileConnected(request.scope, request.receive):
            trace = await self._profiles.of_worker(worker_id, num_steps=int(steps), seconds=seconds)
        headers = _NOT_KEPT | {STEPS_HEADER: str(trace.num_steps)}
        return Response(trace.content, headers=headers, media_type="application/gzip")


def _drawn(tally: StackTally, shape: str, title: str) -> tuple[str | bytes, str]:
    """With its media type."""
    if shape == "svg":
        return flame_svg(tally, title=title), "image/svg+xml"
    if shape == "collapsed":
        return collapsed(tally), "text/plain; charset=utf-8"
    return orjson.dumps(speedscope(tally, name=title, period_s=PERIOD_S)), "application/json"


def _parameters(request: Request, known: set[str]) -> dict[str, str]:
    """What was asked for, by an operator. Raises NotAllowed, InvalidRequest."""
    if not request.state.sees_all:
        raise NotAllowed("this key is no operator's: profiles show what the whole router does")
    query = request.query_params
    if unknown := query.keys() - known:
        raise InvalidRequest(f"{min(unknown)[:40]!r} is no parameter of this page; {', '.join(sorted(known))} are")
    return dict(query)


def _number(asked: dict[str, str], name: str, default: float) -> float:
    text = asked.get(name)
    if text is None:
        return default
    try:
        number = float(text[:_MAX_CHARS])
    except ValueError:
        raise InvalidRequest(f"{name} must be a number", param=name) from None
    if not 0.0 < number < 1e9:
        raise InvalidRequest(f"{name} must be above 0", param=name)
    return number
