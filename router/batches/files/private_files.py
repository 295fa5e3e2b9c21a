"""Files that hold clients' prompts and answers: readable by the router's own user, whatever the umask. Blocking."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

_FILE, FOLDER = 0o600, 0o700


def open_private(path: Path, mode: Literal["wb", "ab"], *, buffering: int = -1) -> IO[bytes]:
    """Open for writing; a new file has mode 0600."""
    return open(path, mode, buffering, opener=_open)  # Path.open takes no opener


def make_private(folder: Path) -> None:
    """Create the folder, and missing ones above it, with mode 0700."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=FOLDER, exist_ok=True)


def close_to_others(folder: Path) -> None:
    """Set mode 0700 on a folder that an earlier version made, if it exists and is ours."""
    with suppress(FileNotFoundError, PermissionError):
        folder.chmod(FOLDER)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE)
