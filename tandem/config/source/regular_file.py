"""Reads files that a user names: only regular ones, within a bound, and without ever blocking.

Opening a FIFO waits for a writer, a device may never end, and the size by `stat` may be wrong. Only regular files are
therefore accepted, opening does not block, and the bound applies to the bytes that are read.
"""

import os
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from tandem.errors import ConfigError, UnreadableFile

MAX_SMALL_BYTES = 1 << 20
"""Maximum size of a configuration, a key or a certificate."""
_CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
Check = Callable[[os.stat_result], None]


def read_regular_file(path: Path, *, max_bytes: int = MAX_SMALL_BYTES, check: Check | None = None) -> bytes:
    """Read a regular file. `check` gets the status of the open file before it is read.

    Raises UnreadableFile, which begins with the path, and whatever `check` raises.
    """
    return b"".join(read_regular_pieces(path, max_bytes=max_bytes, check=check))


def read_regular_pieces(path: Path, *, max_bytes: int, check: Check | None = None) -> Generator[bytes]:
    """Read a regular file in pieces of a MiB. Raises as `read_regular_file`, in the course of reading."""
    try:
        # Also before opening: opening some devices has effects.
        _refuse_special(path, os.stat(path))
        fd = os.open(path, _FLAGS)
        try:
            status = os.fstat(fd)
            _refuse_special(path, status)
            if check is not None:
                check(status)
            yield from _read(fd, path, max_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL in a path
        raise UnreadableFile(f"{str(path)!r} is not a valid path") from None


def read_regular_text(
    path: Path, *, max_bytes: int = MAX_SMALL_BYTES, encoding: str = "utf-8", check: Check | None = None
) -> str:
    """Read a regular file as text. Raises as `read_regular_file`, and ConfigError for a wrong encoding."""
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


def _read(fd: int, path: Path, max_bytes: int) -> Iterator[bytes]:
    left = max_bytes + 1
    while left and (piece := os.read(fd, min(left, _CHUNK_BYTES))):
        left -= len(piece)
        if not left:
            raise UnreadableFile(f"{path}: larger than {max_bytes} bytes")
        yield piece
