"""One account of rate limits for the router processes of one host: exact, and owned by none of them.

The account is a file mapped into each process (`router.host_peers.account_file`), in a folder that only their user can
enter. A cleaner of temporary folders (systemd-tmpfiles, tmpreaper) may remove it while they run: each process notices
when it next counts a request of a tenant with limits, and continues, with all use recorded so far, in the file that is
then at the path, or in a new one. Until then its requests in flight are not counted by processes that noticed earlier.
"""

import logging
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from router.admission.rate_limits import LimitUsage
from router.host_peers.account_file import AccountFile
from tandem.values.ids import Incarnation

_FILE: Final = "rate-limits-1"
"""Name with the number of the layout, so that versions with another layout use another file."""
_AGAIN_S: Final = 10.0
"""Pause between attempts to replace a file that was removed."""
_log = logging.getLogger(__name__)


class RateLimitFile:
    """One process's access; a context manager. A process has one, since the kernel's locks belong to the process."""

    def __init__(self, folder: Path, *, router: Incarnation) -> None:
        """`router`: identifies this process to routers of other hosts."""
        self._path = folder / _FILE
        self._router = router
        self._file: AccountFile | None = None
        self._replace_from_s = 0.0

    def __enter__(self) -> Self:
        """Raises OSError when the folder is not writable, its disk is full, or too many processes share it."""
        self._file = AccountFile(self._path, router=self._router)
        self._file.unlock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def file(self) -> AccountFile | None:
        """The file that currently holds the account; None once closed."""
        return self._file

    def usage_of(self, tag: bytes) -> LimitUsage:
        """The account of the tenant with this tag: shared by all processes or, without room, of this one."""
        file = self.lock()
        if file is None:
            return LimitUsage()
        try:
            file.record(tag)
            return HostLimitUsage(self, tag)
        except OSError as error:
            _log.error("%s: %s; tenant limits are now enforced per router process", self._path.name, error)
            return LimitUsage()
        finally:
            file.unlock()

    def routers(self) -> frozenset[Incarnation]:
        """Incarnations of this host's live router processes, and of ended ones whose columns are not taken yet."""
        return frozenset((self._router,)) if self._file is None else self._file.routers()

    def is_first(self) -> bool:
        """Whether this is the first live process, which counts what other hosts admit."""
        return self._file is None or self._file.is_first()

    def lock(self) -> AccountFile | None:
        """Lock the account and return its file; None once closed. Blocks as `AccountFile.lock` does."""
        if self._file is not None:
            if self._file.was_removed() and time.monotonic() >= self._replace_from_s and self._replace(self._file):
                return self._file  # locked
            self._file.lock()
        return self._file

    def _replace(self, former: AccountFile) -> bool:
        """Continue in the file that is now at the path; returns False, and keeps the former one, on failure."""
        try:
            file = AccountFile(self._path, router=self._router)
            try:
                file.merge_from(former)
            except OSError:
                file.close()
                raise
        except OSError as error:
            self._replace_from_s = time.monotonic() + _AGAIN_S
            _log.error("%s was removed and cannot be replaced: %s", self._path, error)
            return False
        self._file = file
        former.close()
        _log.warning("%s was removed while in use, perhaps to clear a temporary folder: replaced", self._path)
        return True


class HostLimitUsage(LimitUsage):
    """The use of one tenant by all router processes of the host."""

    __slots__ = ("_account", "_tag")

    def __init__(self, account: RateLimitFile, tag: bytes) -> None:
        super().__init__()
        self._account = account
        self._tag = tag

    def __enter__(self) -> Self:
        if (file := self._account.lock()) is not None:
            file.load(self._tag, self)
        return self

    def __exit__(self, *_: object) -> None:
        if (file := self._account.file) is not None:
            file.store(self._tag, self)
            file.unlock()

    def drop_ended_processes(self) -> None:
        if (file := self._account.file) is not None:
            file.drop_ended_processes()
            file.load_beside(self._tag, self)

    def release(self) -> None:
        self.num_inflight -= 1
        if (file := self._account.file) is not None:
            file.store_inflight(self._tag, self.num_inflight)
