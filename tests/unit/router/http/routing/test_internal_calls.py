"""Requests of batches, which come over no connection."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.http.routing.internal_calls import InternalCalls


async def test_a_request_that_the_router_fails_at_is_an_answer_of_its_batch() -> None:
    """Else its batch is begun again and again until its day is over."""

    async def broken(_request: Request) -> Response:
        raise RuntimeError("a fault of ours")

    async def echoes(request: Request) -> Response:
        return Response(await request.body())

    calls = InternalCalls({"/broken": broken, "/echoes": echoes})
    status, told = await calls.answer("acme", "/broken", {})
    assert (status, json.loads(told)["error"]["message"]) == (500, "internal error")
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    status, told = await calls.answer("acme", "/echoes", {"prompt": deep})
    assert (status, json.loads(told)["prompt"]) == (200, deep)
