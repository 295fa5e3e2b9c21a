"""Checks a request's head before the request is handled: its size and framing. Pure.

If a request's end or host can be read in two ways, a proxy in front of us may have chosen the other, and take the rest
for another client's request: what RFC 9112 calls invalid is refused, not guessed at.
"""

import re
from collections.abc import Sequence

from tandem.errors import InvalidRequest

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class HeadTooLarge(InvalidRequest):
    """The head has more headers, or longer ones, than any real client sends."""

    http_status = 431


class TargetTooLong(InvalidRequest):
    """The request's target is too long."""

    http_status = 414


def check_size(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise HeadTooLarge for more headers, or longer ones, than are accepted."""
    num_bytes = 0
    for name, value in headers:
        num_bytes += len(name) + len(value)
    if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
        raise HeadTooLarge(f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them")


def check_framing(headers: Sequence[tuple[bytes, bytes]], version: str) -> None:
    """`headers`: with lowercase names. Raises InvalidRequest that names the header."""
    hosts, codings = list[bytes](), list[bytes]()
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidRequest(f"Host: a request must have exactly one, got {len(hosts)}", param="Host")
    if hosts and not _HOST.fullmatch(hosts[0].strip()):
        raise InvalidRequest("Host: not a valid host name or address", param="Host")
    if not codings:
        return
    if codings != [b"chunked"]:
        raise InvalidRequest("Transfer-Encoding: only chunked is supported", param="Transfer-Encoding")
    if version == "1.0":
        raise InvalidRequest("Transfer-Encoding: not allowed in HTTP/1.0", param="Transfer-Encoding")
