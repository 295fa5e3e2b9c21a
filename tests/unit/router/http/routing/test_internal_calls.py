"""Requests of batches, which have no connection."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.http.body.json_body import BodyBounds, JsonBody
from router.http.body.strict_body import StrictBody
from router.http.routing.internal_calls import InternalCalls, InternalEndpoint


class Echoed(StrictBody):
    prompt: Any = None
    priority: Any = None
    stream: Any = None


async def test_internal_call_unexpected_error_is_500_answer() -> None:
    """Otherwise its batch would restart until it expires."""

    async def broken(_request: Request, _body: Echoed) -> Response:
        raise RuntimeError("a fault of ours")

    async def echoes(request: Request, _body: Echoed) -> Response:
        return Response(json.dumps(request.state.json_object))

    endpoints = {
        "/broken": InternalEndpoint(broken, JsonBody(Echoed)),
        "/echoes": InternalEndpoint(echoes, JsonBody(Echoed)),
    }
    calls = InternalCalls(endpoints, BodyBounds.for_model(1 << 20, 512))
    status, content = await calls.answer("acme", "/broken", {})
    assert (status, json.loads(content)["error"]["message"]) == (500, "internal error")
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    status, content = await calls.answer("acme", "/echoes", {"prompt": deep})
    assert (status, json.loads(content)["prompt"]) == (200, deep)
