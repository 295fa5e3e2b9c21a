"""Requests that arrive over no connection, answered by the same handlers as clients' requests."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from router.batches.files.lines import body_to_run
from router.http.body.errors import error_object
from router.http.body.json_body import BodyBounds, JsonBody
from router.types.requests import MAX_PRIORITY
from tandem.errors import InternalError, RouteNotFound, ServingError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InternalEndpoint:
    """A path operation that answers unstreamed, and the body that it takes."""

    answer: Callable[[Request, Any], Awaitable[Response]]
    body: JsonBody[Any]


class InternalCalls:
    """Answers a tenant's body as its endpoint would."""

    def __init__(self, endpoints: Mapping[str, InternalEndpoint], bounds: BodyBounds) -> None:
        self._endpoints = endpoints
        self._bounds = bounds

    async def answer(self, tenant: str, endpoint: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and body, at the lowest priority. Raises a ServingError that is retryable; cancelling it
        cancels the request."""
        try:
            # Not by orjson, which cannot write every nesting depth that it can read.
            return await self._answer(tenant, endpoint, json.dumps(body_to_run(body, MAX_PRIORITY)).encode())
        except ServingError as error:
            if error.retryable:
                raise
            return error.http_status, orjson.dumps(error_object(error))
        except Exception:  # noqa: BLE001  # a request that fails must not keep its batch from ending
            _log.exception("a request of a batch failed")
            failed = InternalError("internal error")
            return failed.http_status, orjson.dumps(error_object(failed))

    async def _answer(self, tenant: str, endpoint: str, body: bytes) -> tuple[int, bytes]:
        found = self._endpoints.get(endpoint)
        if found is None:
            raise RouteNotFound(f"{endpoint} is not supported in batches")
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client never disconnects
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "raw_path": endpoint.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {"tenant": tenant},
        }
        request = Request(scope, receive)
        answer = await found.answer(request, await found.body.read(request, self._bounds))
        return answer.status_code, bytes(answer.body)
