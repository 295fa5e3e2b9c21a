"""Reading a request's JSON: bounded while it arrives, strict when it is parsed."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from router.http.link import link_of
from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

BODY_TIMEOUT_S = 30.0
"""A client that needs longer for its body is cut off."""
INLINE_BYTES = 64 << 10
"""Larger bodies are parsed off the event loop."""
MIN_MAX_VALUES = 1 << 18
"""Least bound of the values in one body."""
_ID_LIST = re.compile(rb"\[[0-9, \t\r\n]{64,}+\]")
_GREAT_INTEGER = re.compile(rb"[0-9]{19}")


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
    def of(cls, max_bytes: int, max_model_len: int) -> "BodyBounds":
        """Values for a prompt of token ids as long as the context, and as many again."""
        return cls(max_bytes=max_bytes, max_values=max(MIN_MAX_VALUES, 2 * max_model_len))


async def read_object(request: Request, bounds: BodyBounds) -> dict[str, Any]:
    """The body as one JSON object. Raises RequestTooLarge, BodyTimeout, InvalidRequest or Cancelled."""
    body = await _read(request, bounds.max_bytes)
    if len(body) <= INLINE_BYTES:
        data = parse(body)
    else:
        data = await asyncio.to_thread(_parse_large, body, bounds.max_values)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


def parse(body: bytes) -> Any:
    """Strict JSON (RFC 8259, I-JSON): UTF-8, no lone surrogates, no NaN or infinities, no key twice, bounded depth.

    Raises InvalidRequest that says where.
    """
    try:
        # orjson refuses what it should but takes duplicate keys and rounds great integers; the second reading does not.
        _parse_fast(body)
        return json.loads(body, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None
    except ValueError:
        # Python's bound on the digits of an integer.
        raise InvalidRequest("the body is not valid JSON: a number is out of range") from None


def check_num_values(body: bytes, max_values: int) -> None:
    """Raise RequestTooLarge for more values than that, before any of them becomes an object. Bytes that are no JSON
    may pass."""
    if body.count(b",") < max_values:
        return
    # Commas of texts count for nothing: cut the strings out, once no quote in them is left to mislead.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    few_strings = plain.count(b'"') <= 4 * max_values
    if not few_strings or b"".join(plain.split(b'"')[::2]).count(b",") >= max_values:
        raise RequestTooLarge(f"the body has more than {max_values} values")


def _parse_large(body: bytes, max_values: int) -> Any:
    """As `parse`, for a thread: parsers keep the interpreter to themselves, so what they read is kept small."""
    check_num_values(body, max_values)
    # Token ids need no second reading: no key is among them, and an id that is rounded is far beyond any vocabulary.
    outline = _ID_LIST.sub(b"[0]", body)
    if len(outline) == len(body) or _GREAT_INTEGER.search(outline):
        return parse(body)
    data = _parse_fast(body)
    try:
        parse(outline)
    except InvalidRequest:
        return parse(body)  # What looked like a list of ids may have been part of a key.
    return data


def _parse_fast(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (line {error.lineno})") from None


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
