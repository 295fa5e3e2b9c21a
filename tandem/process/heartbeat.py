"""Heartbeat of a process to its parent: first that it serves, then repeatedly that its event loop runs.

Only a process with siblings sends one: if it hangs, the others can do its work, but its clients' requests are lost
until it is ended (`cluster.supervisor.supervisor`). Between two beats there may be news, a JSON object in a line of its
own.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tandem.process.lifetime import announce

BEAT_S = 0.5


class Heartbeat:
    """This process's heartbeat over the pipe it was given, which is closed at the end. Needs a running event loop."""

    def __init__(self, ready_fd: int | None, *, beats: bool) -> None:
        """A descriptor of None disables it. Without `beats` it only announces that the process serves."""
        self._fd = ready_fd
        self._beats = beats
        self._timer: asyncio.TimerHandle | None = None
        self._owed = b""
        """Unsent rest of a message for which the pipe had no room."""
        self._news: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Announce that the process serves."""
        if self._fd is None:
            return
        if not self._beats:
            announce(self._fd, facts)
            self._fd = None
            return
        announce(os.dup(self._fd), facts)
        os.set_blocking(self._fd, False)
        self._beat()

    def send(self, news: Mapping[str, Any]) -> None:
        """Send facts before the next beats; a newer message replaces a waiting one. Does nothing without beats."""
        self._news = b"\n" + json.dumps(dict(news)).encode() + b"\n"
        if self._timer is not None:
            self._timer.cancel()
            self._beat()

    def _beat(self) -> None:
        if self._fd is None:
            return
        if not self._owed and self._news is not None:
            self._owed, self._news = self._news, None
        said = self._owed or b"."
        try:
            self._owed = said[os.write(self._fd, said) :]
        except BlockingIOError:
            pass  # the last ones have not been read yet
        except OSError:
            return  # the reader has gone
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
