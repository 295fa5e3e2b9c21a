"""Parses an upload (RFC 7578) by python-multipart: its file goes to disk, everything else into bounded memory."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from router.batches.files.private_files import open_private
from router.http.body.json_body import BodyTimeout
from tandem.errors import Cancelled, InvalidRequest, RequestTooLarge

UPLOAD_TIMEOUT_S = 600.0
FRAME_BYTES = 64 << 10
"""Bytes of everything but the file."""
_MAX_PARTS = 16
_MAX_NAME_BYTES, _MAX_FILENAME_BYTES, _MAX_BOUNDARY_BYTES = 100, 255, 70
_FILE, _UNNAMED = "file", "file"
_SILENT = logging.Logger("multipart", logging.CRITICAL)
"""Clients' errors are answered, not logged: there may be many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The form's fields beside its file's content."""

    fields: dict[str, str]
    filename: str


async def read_upload(request: Request, content: Path, *, max_bytes: int) -> Upload:
    """Write the body's file to `content`. Raises RequestTooLarge, InvalidRequest, BodyTimeout, Cancelled."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
        raise InvalidRequest("send multipart/form-data with the parts file and purpose")
    with open_private(content, "wb") as file:
        form = _Form(file, boundary, max_bytes)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                async for chunk in request.stream():
                    await asyncio.to_thread(form.write, chunk)
        except TimeoutError:
            raise BodyTimeout(f"the file did not arrive within {UPLOAD_TIMEOUT_S} s") from None
        except ClientDisconnect:
            raise Cancelled("the client disconnected") from None
        return form.complete()


class _Form:
    """Collects the parts of one form as the parser finds them."""

    def __init__(self, file: IO[bytes], boundary: bytes, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._num_file_bytes = self._num_frame_bytes = self._num_parts = 0
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._name = ""
        self._header = self._value = b""
        self._disposition = ""
        self._has_begun = self._has_ended = False
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_end": self._on_end,
        }
        self._parser = MultipartParser(boundary, calls, max_header_size=FRAME_BYTES)  # type: ignore[arg-type]
        self._parser.logger = _SILENT

    def write(self, chunk: bytes) -> None:
        """Parse a chunk. Raises InvalidRequest or RequestTooLarge."""
        self._has_begun = self._has_begun or bool(chunk)
        before = self._num_file_bytes
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _broken() from None
        # Everything but the file: part headers, fields, and any bytes before the first part or after the last.
        self._num_frame_bytes += len(chunk) - (self._num_file_bytes - before)
        if self._num_frame_bytes > FRAME_BYTES:
            raise RequestTooLarge(f"the form has more than {FRAME_BYTES} bytes beside its file")

    def complete(self) -> Upload:
        """Return the form. Raises InvalidRequest if it has not ended, or has no file."""
        if not self._has_begun:
            raise InvalidRequest("the body is empty")
        if not self._has_ended:
            raise _broken()
        if self._filename is None:
            raise InvalidRequest("file is missing", param="file")
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        return Upload(fields=fields, filename=self._filename)

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _broken()
        self._header = self._value = b""
        self._disposition = ""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value.decode("latin-1")
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        given = options.get(b"name", b"") if kind == b"form-data" else b""
        self._name = name = given[:_MAX_NAME_BYTES].decode("utf-8", "replace")
        if not name or name in self._fields or (name == _FILE and self._filename is not None):
            raise InvalidRequest("a part has no name, or a duplicate name", param=name or None)
        if name == _FILE:
            filename = options.get(b"filename", _UNNAMED.encode())[:_MAX_FILENAME_BYTES]
            self._filename = filename.decode("utf-8", "replace")
        else:
            self._fields[name] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != _FILE:
            # Bounded together with everything else that is not the file.
            self._fields[self._name] += data[start:end]
            return
        self._num_file_bytes += end - start
        if self._num_file_bytes > self._max_bytes:
            raise RequestTooLarge(f"the file is larger than {self._max_bytes} bytes", param="file")
        self._file.write(memoryview(data)[start:end])

    def _on_end(self) -> None:
        self._has_ended = True


def _broken() -> InvalidRequest:
    return InvalidRequest("the body is not valid multipart/form-data")
