"""Parses clients' JSON strictly and within bounds. Pure: runs on the event loop, or in a thread where it is long."""

import json
import re
from contextlib import suppress
from typing import Any, Never

import orjson

from tandem.errors import InvalidRequest, RequestTooLarge

_ID_LIST = re.compile(rb"\[[0-9, \t\r\n]{64,}+\]")
_WHITE_SPACE = " \t\r\n"
_GREAT_INTEGER = re.compile(rb"[0-9]{19}")


def parse(body: bytes) -> Any:
    """Parse strict JSON (RFC 8259, I-JSON): UTF-8, no lone surrogates, no NaN or infinities, unique keys, bounded
    depth.

    Raises InvalidRequest that names the position.
    """
    try:
        # orjson rejects what it should but accepts duplicate keys and rounds large integers; the second parser does
        # not.
        _parse_fast(body)
        # Nothing but the document is left, so that its end need not be checked again.
        return _STRICT.raw_decode(body.decode().lstrip(_WHITE_SPACE))[0]
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None
    except ValueError:
        # Python's bound on the digits of an integer.
        raise InvalidRequest("the body is not valid JSON: a number is out of range") from None


def check_num_values(body: bytes, max_values: int) -> None:
    """Raise RequestTooLarge for more values than that, before any of them becomes an object. Malformed JSON may
    pass."""
    if body.count(b",") < max_values:
        return
    # Commas within strings do not count: cut the strings out, once no escaped quote in them can mislead.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    few_strings = plain.count(b'"') <= 4 * max_values
    if not few_strings or b"".join(plain.split(b'"')[::2]).count(b",") >= max_values:
        raise RequestTooLarge(f"the body has more than {max_values} values")


def parse_large(body: bytes, max_values: int) -> Any:
    """Parse like `parse`, but for a thread: parsers hold the GIL, so what they read is kept small."""
    check_num_values(body, max_values)
    # Token ids need no second parser: there are no keys among them, and a rounded id is far beyond any vocabulary.
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
        _refuse_constants(body)
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (line {error.lineno})") from None


def _refuse_constants(body: bytes) -> None:
    """Raise InvalidRequest for NaN or infinities, which Python's own encoder writes, in otherwise valid JSON."""
    with suppress(ValueError, RecursionError):
        json.loads(body, parse_constant=_refuse_constant)


def _refuse_constant(constant: str) -> Never:
    raise InvalidRequest(f"the body is not valid JSON: {constant} is not a JSON number; send a finite number or null")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("the body is not valid JSON: an object has a duplicate key")
    return found


_STRICT = json.JSONDecoder(object_pairs_hook=_unique)
