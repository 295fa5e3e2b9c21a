"""Reads a request's JSON: bounded while it arrives, strict when it is parsed (`router.api.request.strict_json`).

FastAPI reads the body of a path operation before it solves any dependency, whatever its size, and so before a key is
checked. Therefore no path operation here declares a body parameter. `JsonBody` is a dependency, solved after the one
for access, and `router.http.openapi.document` describes it.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from router.api.request.strict_json import parse, parse_large
from router.http.body.client_link import link_of
from router.http.body.strict_body import StrictBody, refusal_of
from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

BODY_TIMEOUT_S = 30.0
"""Time for a body to arrive."""
INLINE_BYTES = 64 << 10
"""Larger bodies are parsed off the event loop."""
MIN_MAX_VALUES = 1 << 18
"""Smallest bound on the values in one body."""


_B = TypeVar("_B", bound=StrictBody)


class BodyTimeout(InvalidRequest):
    """The client was too slow to send its body."""

    http_status = 408


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """Bounds on one body."""

    max_bytes: int
    max_values: int
    """Numbers, strings, lists and objects; checked where parsing them would take long."""

    @classmethod
    def for_model(cls, max_bytes: int, max_model_len: int) -> "BodyBounds":
        """Allow twice the values of a prompt of token ids as long as the context."""
        return cls(max_bytes=max_bytes, max_values=max(MIN_MAX_VALUES, 2 * max_model_len))


class JsonBody(Generic[_B]):
    """A FastAPI dependency: the request's body, read within bounds and validated."""

    def __init__(self, model: type[_B], bounds: BodyBounds | None = None) -> None:
        """`bounds`: the application's (`app.state.body_bounds`) when absent."""
        self.model = model
        self._bounds = bounds

    async def __call__(self, request: Request) -> _B:
        return await self.read(request, self._bounds or request.app.state.body_bounds)

    async def read(self, request: Request, bounds: BodyBounds) -> _B:
        """Read and validate the body. Raises RequestTooLarge, BodyTimeout, InvalidRequest or Cancelled.

        The parsed JSON stays in `request.state.json_object`, as the client wrote it.
        """
        data = await read_object(request, bounds)
        # `request.state`, without starlette's objects around it.
        request.scope.setdefault("state", {})["json_object"] = data
        return validate(self.model, data)


def validate(body: type[_B], data: dict[str, Any]) -> _B:
    """Return the typed body. Raises InvalidRequest that names the first wrong field and quotes nothing of it."""
    try:
        valid: _B = body.__pydantic_validator__.validate_python(data)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False, include_context=False, include_input=False)) from None
    return valid


async def read_object(request: Request, bounds: BodyBounds) -> dict[str, Any]:
    """Read the body as one JSON object. Raises RequestTooLarge, BodyTimeout, InvalidRequest or Cancelled."""
    link = link_of(request.scope)
    body = None if link is None else link.whole_body()
    if body is None:
        body = await _read(request, bounds.max_bytes)
    elif len(body) > bounds.max_bytes:
        raise _too_large(bounds.max_bytes)
    if len(body) <= INLINE_BYTES:
        data = parse(body)
    else:
        data = await asyncio.to_thread(parse_large, body, bounds.max_values)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


async def _read(request: Request, max_bytes: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                body += chunk
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None
    return bytes(body)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes")
