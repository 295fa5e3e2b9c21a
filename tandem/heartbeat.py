"""What a process tells whoever started it: first that it serves, and then, again and again, that its event loop runs.

Only a process that others stand beside does so: if it hangs they can do its work, but what clients ask of it is lost to
them until it is ended (`cluster.supervisor`).
"""

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tandem.process import announce

BEAT_S = 0.5


class Heartbeat:
    """Of this process, over the pipe that it was given; the pipe is closed at the end. Needs a running event loop."""

    def __init__(self, ready_fd: int | None, *, beats: bool) -> None:
        """None: nobody listens. Without `beats` it only says that the process serves."""
        self._fd = ready_fd
        self._beats = beats
        self._timer: asyncio.TimerHandle | None = None

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
        """Say that the process serves."""
        if self._fd is None:
            return
        if not self._beats:
            announce(self._fd, facts)
            self._fd = None
            return
        announce(os.dup(self._fd), facts)
        os.set_blocking(self._fd, False)
        self._beat()

    def _beat(self) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, b".")
        except BlockingIOError:
            pass  # nobody has read the last ones
        except OSError:
            return  # nobody listens any more
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
