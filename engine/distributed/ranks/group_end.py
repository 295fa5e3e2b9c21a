"""Ends a group of ranks: reports the end once to its listeners, and kills ranks that do not exit by themselves."""

import logging
import os
import threading
from collections.abc import Callable

from engine.distributed.links.lost import RankLost

_log = logging.getLogger(__name__)


class GroupEnd:
    """The end of one group. May be used from any thread."""

    def __init__(self, *, exit_s: float, is_expected: bool = False) -> None:
        """`exit_s`: time from a rank's death in which this process must close the group, or it is killed.

        `is_expected`: ranks are meant to end with their worker, which runs elsewhere.
        """
        self._is_expected = is_expected
        self._exit_s = exit_s
        self._lock = threading.Lock()
        self._listeners: list[Callable[[RankLost], None]] = []
        self._lost: RankLost | None = None
        self._closing = threading.Event()

    @property
    def lost(self) -> RankLost | None:
        """The loss that ended the group, if one did."""
        with self._lock:
            return self._lost

    def watch(self, listener: Callable[[RankLost], None]) -> None:
        """Call `listener` with the first loss, on any thread; at once when there has been one."""
        with self._lock:
            self._listeners.append(listener)
            lost = self._lost
        if lost is not None:
            listener(lost)

    def report(self, lost: RankLost) -> None:
        """Report a lost rank. Blocks until the group is closed; later losses, echoes of the first, are ignored."""
        with self._lock:
            if self._lost is not None or self._closing.is_set():
                return
            self._lost = lost
            listeners = tuple(self._listeners)
        if self._is_expected:
            _log.info("%s", lost)
        else:
            _log.critical("%s: this worker cannot go on without it", lost)
        for listener in listeners:
            listener(lost)
        if not self._closing.wait(self._exit_s):
            _log.critical("this process has not ended in time: killing it")
            os._exit(1)

    def close(self) -> bool:
        """Begin an orderly end: losses are no longer reported. Returns False when it had begun already."""
        with self._lock:
            was_closing = self._closing.is_set()
            self._closing.set()
        return not was_closing
