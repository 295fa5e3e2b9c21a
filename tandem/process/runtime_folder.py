"""The private folder in which a user's processes on one machine place sockets for each other."""

import os
import socket
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import ConfigError

_ANSWER_S = 1.0
_LEAST_AGE_S = 60.0
"""Minimum age of a socket that may be removed: a process may be about to listen on a younger one."""


def runtime_folder() -> Path:
    """`$XDG_RUNTIME_DIR/tandem`; without that variable, a folder of this user in the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "tandem" if runtime else Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"


def place_for_socket(path: Path, what: str) -> None:
    """Prepare a socket's private folder. Raises ConfigError, naming the setting `what`, where that fails."""
    make_private_folder(path.parent, what)
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{what}: {path} exists and is not a socket")


def untrusted_socket_reason(path: Path) -> str | None:
    """Reason to distrust the process behind this socket; None if only this user can have created it."""
    try:
        found = path.parent.stat()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o022:
        return f"{path.parent} can be written to by others than this user"
    return None


def is_trusted_peer(link: socket.socket) -> bool:
    """Whether the other end of a connected Unix socket runs as this user, or as root."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.getuid(), 0)


def has_listener(path: Path) -> bool:
    """Whether a process listens at this Unix socket; the file alone may be left over from an ended one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # the queue is full
        except OSError:
            return False
    return True


def remove_dead_sockets(folder: Path) -> None:
    """Remove this user's sockets on which no process listens, left over from killed ones. Blocks briefly."""
    with suppress(OSError):
        for path in folder.glob("*.sock*"):
            with suppress(OSError):
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or time.time() - found.st_mtime < _LEAST_AGE_S:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            # Other errors prove nothing, such as that of a full queue.
            path.unlink()


def make_private_folder(folder: Path, what: str) -> None:
    """Create the folder if needed. Raises ConfigError, naming the setting `what`, if others could enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"{what}: {folder}: {error.strerror}") from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{what}: {folder} is accessible to other users")
