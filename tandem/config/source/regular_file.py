"""Reads files that a user names: regular ones only, none beyond its bound, and without ever waiting for a writer.

Opening a FIFO waits until somebody writes to it, a device may never end, and `stat` need not say how much there is to
read. So whatever is no regular file is refused, opening does not block, and the bound is of the bytes that come.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from tandem.errors import ConfigError, UnreadableFile

MAX_SMALL_BYTES = 1 << 20
"""Of a configuration, a key, a certificate: more is a mistake."""
_CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
Check = Callable[[os.stat_result], None]


def read_regular_file(path: Path, *, max_bytes: int = MAX_SMALL_BYTES, check: Check | None = None) -> bytes:
    """All bytes of a regular file. `check` sees the status of the very file that is read, before it is.

    Raises UnreadableFile, which begins with the path; what `check` raises.
    """
    try:
        # Before it is opened, too: to open some devices does something.
        _refuse_special(path, os.stat(path))
        fd = os.open(path, _FLAGS)
        try:
            status = os.fstat(fd)
            _refuse_special(path, status)
            if check is not None:
                check(status)
            return _read(fd, path, max_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL in a path
        raise UnreadableFile(f"{str(path)!r} is no path") from None


def read_regular_text(
    path: Path, *, max_bytes: int = MAX_SMALL_BYTES, encoding: str = "utf-8", check: Check | None = None
) -> str:
    """The same as text. Raises ConfigError, which never shows what is in the file, for what is not of the encoding."""
    data = read_regular_file(path, max_bytes=max_bytes, check=check)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not {encoding.upper()} (byte {error.start})") from None


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnreadableFile(f"{path}: Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(f"{path}: {_kind(status.st_mode)}, not a regular file")


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for is_one, name in kinds if is_one(mode)), "a special file")


def _read(fd: int, path: Path, max_bytes: int) -> bytes:
    pieces, left = [], max_bytes + 1
    while left and (piece := os.read(fd, min(left, _CHUNK_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise UnreadableFile(f"{path}: larger than {max_bytes} bytes")
    return b"".join(pieces)
