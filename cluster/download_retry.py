"""How often a download that breaks is tried again: for as long as files come whole now and then. Pure."""

import errno
from dataclasses import dataclass, field
from random import Random

from tandem.backoff import Backoff

_LASTING = frozenset({400, 401, 403, 404, 405, 407, 410, 416, 422, 451})
"""Answers of a server that will say the same tomorrow: no such model, no right to it."""
_FULL_OR_FORBIDDEN = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
)
"""Of the directory."""


@dataclass(slots=True, kw_only=True)
class DownloadPatience:
    """Of one download; told of each failure."""

    most_failures: int
    """In a row, between which no file has come whole."""
    rng: Random
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, most_s=60.0))
    _most_bytes: int = field(init=False, default=0)
    _failures: int = field(init=False, default=0)

    def wait_s(self, error: BaseException, num_bytes: int) -> float | None:
        """An attempt has failed, and so much of the model is there: the pause before the next; None: give up."""
        if num_bytes > self._most_bytes:
            self._most_bytes, self._failures = num_bytes, 0
        self._failures += 1
        if will_fail_again(error) or self._failures >= self.most_failures:
            return None
        return self.backoff.wait_s(self._failures, self.rng)


def will_fail_again(error: BaseException | None) -> bool:
    """Whether what is asked for is not to be had, however often one asks.

    A client's own error says it by the answer that it had from a server, maybe some causes down, or by its type.
    """
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in _LASTING
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in _FULL_OR_FORBIDDEN
        if isinstance(error, ImportError | ValueError | TypeError):
            return True
        error = error.__cause__
    return False
