"""Mutual TLS from files that are renewed while a process runs: each new connection uses them as they are then."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.rpc.certificates import read_pem
from tandem.rpc.mutual_tls import MutualTls, TlsFiles

RETRY_S = 5.0
"""Files that were no good are read again after so long, even if they seem unchanged: a directory above them, or the
file system, may have been what was wrong."""
_READS = 3
"""Attempts to read files that change meanwhile."""
_log = logging.getLogger(__name__)
_Seen = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTls:
    """One state of the files."""

    tls: MutualTls
    cert: bytes
    key: bytes
    ca: bytes


class RenewableTls:
    """Reads the files again when they have changed; bad ones are logged, and the former stay in force. Thread-safe."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        use: str,
        name: str | None = None,
        alpn: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read and try the files. Raises ConfigError that names the file and what is wrong with it.

        `name`, `alpn`: as for MutualTls. `use`: what the certificates are for, in logs.
        """
        self.files = files
        self._use = use
        self._name = name
        self._alpn = alpn
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = _stats(files)
        self._failed_s: float | None = None
        """When the files in place were last found to be no good; None: they are in force."""
        self._complaint = ""
        self._loaded = self._load()

    def current(self) -> LoadedTls:
        """Return what is in force now; the same object until the files change."""
        with self._lock:
            seen, now_s = _stats(self.files), self._clock()
            if seen != self._seen or (self._failed_s is not None and now_s - self._failed_s >= RETRY_S):
                self._seen = seen
                self._reload(now_s)
            return self._loaded

    def _reload(self, now_s: float) -> None:
        try:
            self._loaded = self._load()
        except ConfigError as error:
            self._failed_s = now_s
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("%s; the previous certificates stay in force for %s", error, self._use)
            return
        self._failed_s, self._complaint = None, ""
        _log.info("new certificates of %s are in force for %s", self.files.setting, self._use)

    def _load(self) -> LoadedTls:
        files, setting = self.files, self.files.setting
        for _ in range(_READS):
            seen = _stats(files)
            try:
                cert, key, ca = (
                    read_pem(getattr(files, name), f"{setting}.{name}").encode() for name in ("cert", "key", "ca")
                )
                tls = MutualTls(files, name=self._name, alpn=self._alpn)
            except OSError as error:  # ssl.SSLError, too; a file that was removed after it was read
                raise ConfigError(f"{setting}: {error.strerror or error}") from None
            if _stats(files) == seen:
                return LoadedTls(tls=tls, cert=cert, key=key, ca=ca)
        raise ConfigError(f"{setting}: the files keep changing while they are read")


def _stats(files: TlsFiles) -> _Seen:
    return tuple(_stat(path) for path in (files.cert, files.key, files.ca))


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # The last: a change of owner or mode may make a file readable.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns
