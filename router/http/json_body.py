"""Reading a request's JSON: bounded while it arrives, strict when it is parsed."""

import asyncio
import json
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

BODY_TIMEOUT_S = 30.0
"""A client that needs longer for its body is cut off."""


class BodyTimeout(InvalidRequest):
    """The client was too slow to send what it announced."""

    http_status = 408


async def read_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as one JSON object. Raises RequestTooLarge, BodyTimeout, InvalidRequest or Cancelled."""
    data = parse(await _read(request, max_bytes))
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


def parse(body: bytes) -> Any:
    """Strict JSON (RFC 8259, I-JSON): UTF-8, no lone surrogates, no NaN or infinities, no key twice, bounded depth.

    Raises InvalidRequest that says where.
    """
    try:
        # orjson refuses what it should but takes duplicate keys and rounds great integers; the second reading does not.
        orjson.loads(body)
        return json.loads(body, object_pairs_hook=_unique)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (line {error.lineno})") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None
    except ValueError:
        # Python's bound on the digits of an integer.
        raise InvalidRequest("the body is not valid JSON: a number is out of range") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("the body is not valid JSON: a key stands twice in one object")
    return found


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = RequestTooLarge(f"the body is larger than {max_bytes} bytes")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise too_large
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
