"""Shares adapters among the router processes of one host: those of the configuration, and those that are loaded and
unloaded while the processes run, in a file each.

The latter has every change since the processes were started. A process looks whether it has changed whenever a request
names an adapter, so that a client's next request finds what the last one loaded, whichever process serves it.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from tandem.adapters.files import Adapter
from tandem.cluster_state.entries import MAX_ADAPTER_CHANGES, AdapterChange

_MOST_LINES = 4 * MAX_ADAPTER_CHANGES
"""Changes that the file keeps, the newest: more than any process remembers, which also forgets by age."""
_LONGEST_LOCK_S = 0.25
"""Time limit of waiting for the lock, which is on the event loop: its holder may have been stopped."""
_PAUSE_S = 1e-3


class _Line(msgspec.Struct):
    """One change as the file has it."""

    name: str
    version: int
    path: str | None
    digest: str = ""
    num_bytes: int = 0


_LINES = msgspec.json.Decoder(list[_Line])


class AdapterFile:
    """A `router.api.adapters.AdapterChanges` in a folder that only the processes' user can enter."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "adapters.json"
        self._lock = folder / "adapters.lock"
        self._seen: tuple[int, int, int] | None = None
        self._is_stuck = False

    def read(self) -> tuple[AdapterChange, ...]:
        """Return all changes if any was made since the last call. Raises OSError."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return ()
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark == self._seen:
            return ()
        changes = self._load()
        self._seen = mark
        return changes

    def write(self, changes: Iterable[AdapterChange]) -> None:
        """Merge changes into the file. Raises OSError, also when another process keeps it locked."""
        with self._locked():
            merged = {change.name: change for change in self._load()}
            for change in changes:
                own = merged.get(change.name)
                if own is None or own.order < change.order:
                    merged[change.name] = change
            newest = sorted(merged.values(), key=lambda change: change.order, reverse=True)[:_MOST_LINES]
            content = msgspec.json.encode(list(map(_line, newest)))
            _replace(self._path, content)

    def _load(self) -> tuple[AdapterChange, ...]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        return tuple(map(_change, _LINES.decode(content)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing, for as long as it takes to write a small file."""
        with open(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600), "rb") as file:
            self._wait_for(file)
            yield

    def _wait_for(self, file: IO[bytes]) -> None:
        """Lock the file. Raises TimeoutError; after one, the next try does not wait."""
        ends_s = time.monotonic() + (0.0 if self._is_stuck else _LONGEST_LOCK_S)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= ends_s:
                    self._is_stuck = True
                    held = f"another router process has kept it locked for {_LONGEST_LOCK_S:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, held, str(self._path)) from None
                time.sleep(_PAUSE_S)  # the kernel does not tell when another process releases its lock
            else:
                self._is_stuck = False
                return


def identify_once(folder: Path, paths: Mapping[str, Path], read: Callable[[str, Path], Adapter]) -> list[Adapter]:
    """Return the configured adapters, by name and directory, as the first process of this host has identified them.

    Only that one reads the files, while the others wait for it; one that starts again serves what its siblings do, also
    where the files have changed since. Raises OSError, and what `read` raises.
    """
    path = folder / "configured_adapters.json"
    with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            lines = _LINES.decode(path.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            lines = []
        known = {one.name: one for line in lines if (one := _change(line).adapter) is not None}
        found = [
            one if (one := known.get(name)) is not None and one.path == place else read(name, place)
            for name, place in paths.items()
        ]
        # Version 0: these are no changes.
        changes = (AdapterChange(name=one.name, version=0, adapter=one) for one in found)
        _replace(path, msgspec.json.encode(list(map(_line, changes))))
    return found


def _replace(path: Path, content: bytes) -> None:
    """Write a file for its user only, which others read as a whole or not at all."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


def _line(change: AdapterChange) -> _Line:
    adapter = change.adapter
    if adapter is None:
        return _Line(name=change.name, version=change.version, path=None)
    return _Line(
        name=change.name,
        version=change.version,
        path=str(adapter.path),
        digest=adapter.digest,
        num_bytes=adapter.num_bytes,
    )


def _change(line: _Line) -> AdapterChange:
    if line.path is None:
        return AdapterChange(name=line.name, version=line.version, adapter=None)
    adapter = Adapter(name=line.name, path=Path(line.path), digest=line.digest, num_bytes=line.num_bytes)
    return AdapterChange(name=line.name, version=line.version, adapter=adapter)
