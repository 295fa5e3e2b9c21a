"""What is wrong with a request's head before anybody answers it: its size, and how it is framed. Pure.

Of two readings of where a request ends or whom it is for, a proxy before us may have taken the other one, and take the
rest for another client's request: what RFC 9112 calls invalid is refused, not guessed at.
"""

import re
from collections.abc import Sequence

from tandem.errors import InvalidRequest

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class HeadTooLarge(InvalidRequest):
    """More headers, or longer ones, than any client of ours sends."""

    http_status = 431


class TargetTooLong(InvalidRequest):
    """So is the request's target."""

    http_status = 414


def check_size(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise HeadTooLarge for more headers, or longer ones, than are read."""
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise HeadTooLarge(f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them")


def check_framing(headers: Sequence[tuple[bytes, bytes]], version: str) -> None:
    """`headers`: names in small letters. Raises InvalidRequest that names the header."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidRequest(f"Host: {len(hosts)} of them, and a request has one", param="Host")
    if hosts and not _HOST.fullmatch(hosts[0].strip()):
        raise InvalidRequest("Host: no name or address of a host", param="Host")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return
    if codings != [b"chunked"]:
        raise InvalidRequest("Transfer-Encoding: chunked is the one that is known here", param="Transfer-Encoding")
    if version == "1.0":
        raise InvalidRequest("Transfer-Encoding: HTTP/1.0 has none", param="Transfer-Encoding")
