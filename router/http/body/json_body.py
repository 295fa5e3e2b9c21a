"""Reading a request's JSON: bounded while it arrives, strict when it is parsed (`router.api.request.strict_json`)."""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from router.api.request.strict_json import parse, parse_large
from router.http.body.client_link import link_of
from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

BODY_TIMEOUT_S = 30.0
"""A client that needs longer for its body is cut off."""
INLINE_BYTES = 64 << 10
"""Larger bodies are parsed off the event loop."""
MIN_MAX_VALUES = 1 << 18
"""Least bound of the values in one body."""


class BodyTimeout(InvalidRequest):
    """The client was too slow to send what it announced."""

    http_status = 408


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """What one body may hold."""

    max_bytes: int
    max_values: int
    """Numbers, texts, lists, objects; checked where parsing them would take long."""

    @classmethod
    def for_model(cls, max_bytes: int, max_model_len: int) -> "BodyBounds":
        """Values for a prompt of token ids as long as the context, and as many again."""
        return cls(max_bytes=max_bytes, max_values=max(MIN_MAX_VALUES, 2 * max_model_len))


async def read_object(request: Request, bounds: BodyBounds) -> dict[str, Any]:
    """The body as one JSON object. Raises RequestTooLarge, BodyTimeout, InvalidRequest or Cancelled."""
    body = await _read(request, bounds.max_bytes)
    if len(body) <= INLINE_BYTES:
        data = parse(body)
    else:
        data = await asyncio.to_thread(parse_large, body, bounds.max_values)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = RequestTooLarge(f"the body is larger than {max_bytes} bytes")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise too_large
    if (link := link_of(request.scope)) is not None and (whole := link.whole_body()) is not None:
        if len(whole) > max_bytes:
            raise too_large
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise too_large
                body += chunk
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise Cancelled("the client left") from None
    return bytes(body)
