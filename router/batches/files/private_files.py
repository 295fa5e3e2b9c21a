"""Files that hold clients' prompts and answers: readable by the router's own user, whatever the umask. Blocking."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

_FILE, FOLDER = 0o600, 0o700


def open_private(path: Path, mode: Literal["wb", "ab"], *, buffering: int = -1) -> IO[bytes]:
    """To write; a new one is nobody else's."""
    return open(path, mode, buffering, opener=_open)  # Path.open takes no opener


def make_private(folder: Path) -> None:
    """With those above it that are missing."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER, exist_ok=True)


def close_to_others(folder: Path) -> None:
    """One that was made when nobody saw to that, if it is there and ours."""
    with suppress(FileNotFoundError, PermissionError):
        folder.chmod(FOLDER)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE)
