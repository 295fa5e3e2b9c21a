"""An upload (RFC 7578): written to disk as it comes, bounded, and taken apart there."""

import asyncio
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from router.batches.files.private_files import open_private
from router.http.body.json_body import BodyTimeout
from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

UPLOAD_TIMEOUT_S = 600.0
FRAME_BYTES = 64 << 10
"""For all that is not the file."""
_MOST_PARTS = 16
_SEARCH_BYTES = 1 << 20
"""A search holds the interpreter until it ends: a large file is searched in pieces."""
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?i)^content-disposition:\s*form-data\s*;(?:.*;)?\s*name="([^"\r\n]{1,100})"', re.MULTILINE)
_FILENAME = re.compile(rb'(?i)\bfilename="([^"\r\n]{0,255})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What was sent."""

    fields: dict[str, str]
    filename: str


async def read_upload(request: Request, raw: Path, content: Path, *, max_bytes: int) -> Upload:
    """The body's file goes to `content`, by way of `raw`. Raises RequestTooLarge, InvalidRequest, BodyTimeout."""
    found = _BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        raise InvalidRequest("send multipart/form-data with the parts file and purpose")
    boundary = (found[1] or found[2]).encode("latin-1")
    try:
        await _receive(request, raw, max_bytes + FRAME_BYTES)
        return await asyncio.to_thread(_take_apart, raw, content, boundary, max_bytes)
    finally:
        await asyncio.to_thread(raw.unlink, missing_ok=True)


async def _receive(request: Request, raw: Path, most: int) -> None:
    size = 0
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            with open_private(raw, "wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > most:
                        raise RequestTooLarge(f"the file is larger than {most - FRAME_BYTES} bytes", param="file")
                    await asyncio.to_thread(file.write, chunk)
    except TimeoutError:
        raise BodyTimeout(f"the file did not arrive within {UPLOAD_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise Cancelled("the client left") from None


def _take_apart(raw: Path, content: Path, boundary: bytes, max_bytes: int) -> Upload:
    if not raw.stat().st_size:
        raise InvalidRequest("the body is empty")
    fields: dict[str, str] = {}
    filename: str | None = None
    with raw.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        for head, begin, end in _parts(body, b"--" + boundary):
            named = _NAME.search(head)
            name = "" if named is None else named[1].decode("utf-8", "replace")
            if not name or name in fields or (name == "file" and filename is not None):
                raise InvalidRequest("a part has no name, or the name of another one", param=name or None)
            if name != "file":
                if end - begin > FRAME_BYTES:
                    raise InvalidRequest(f"{name}: too long", param=name)
                fields[name] = body[begin:end].decode("utf-8", "replace")
                continue
            if end - begin > max_bytes:
                raise RequestTooLarge(f"the file is larger than {max_bytes} bytes", param="file")
            given = _FILENAME.search(head)
            filename = given[1].decode("utf-8", "replace") if given is not None else "file"
            with open_private(content, "wb") as out:
                for start in range(begin, end, 1 << 20):
                    out.write(body[start : min(end, start + (1 << 20))])
    if filename is None:
        raise InvalidRequest("file is missing", param="file")
    return Upload(fields=fields, filename=filename)


def _parts(body: mmap.mmap, mark: bytes) -> list[tuple[bytes, int, int]]:
    """Each part's head, and where its content begins and ends. Raises InvalidRequest."""
    broken = InvalidRequest("the body is not multipart/form-data as its content type says")
    found: list[tuple[bytes, int, int]] = []
    at = _find(body, mark, 0)
    while at >= 0:
        at += len(mark)
        if body[at : at + 2] == b"--":
            return found
        head_end = body.find(b"\r\n\r\n", at, at + FRAME_BYTES)
        end = _find(body, b"\r\n" + mark, at)
        if head_end < 0 or end < 0 or len(found) >= _MOST_PARTS:
            raise broken
        found.append((body[at:head_end], head_end + 4, max(head_end + 4, end)))
        at = end + 2
    raise broken


def _find(body: mmap.mmap, what: bytes, at: int) -> int:
    """As `body.find`."""
    while at < len(body):
        if (found := body.find(what, at, at + _SEARCH_BYTES + len(what) - 1)) >= 0:
            return found
        at += _SEARCH_BYTES
    return -1
