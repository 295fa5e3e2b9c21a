"""Priorities of engine threads, where engines share processors with event loops.

An engine computes for milliseconds at a stretch. A router or a worker's own event loop on the same processors needs
microseconds, at once: it answers clients, passes tokens on, and sends heartbeats to peers. At equal priority the
system makes it wait for whole time slices of an engine (measured in docs/extend/measurements.md).

Linux may divide the processors between sessions first (autogroups), and niceness counts only within each. Workers that
`tandem up` starts lead sessions of their own, so there the whole session's priority is lowered as well, against the
router's.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

NICENESS = 5
"""Niceness of engine threads: a third of a normal thread's share, and only while both want the processor."""
_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 10
_BETWEEN_TRIES_S = 0.11
"""Pause between tries: without root, one autogroup of the whole system may be set every tenth of a second."""


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread and of threads that it starts. Does nothing where a priority belongs to
    a whole process (anywhere but on Linux), or may not be set.
    """
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
    # A session that another process leads, a shell's, is not ours to slow down.
    if os.getsid(0) == os.getpid():
        _lower_session_priority()


def _lower_session_priority() -> None:
    """Lower the priority of this session. Does nothing where the system has no autogroups, or they may not be set."""
    for _ in range(_TRIES):
        try:
            niceness = session_niceness()
            if niceness is not None and niceness < NICENESS:
                _AUTOGROUP.write_text(f"{NICENESS}", encoding="ascii")
        except BlockingIOError:
            # Nothing waits for this thread yet: the engine has not started.
            time.sleep(_BETWEEN_TRIES_S)
        except OSError:
            return
        else:
            return


def session_niceness() -> int | None:
    """Niceness of this process's session. None without autogroups, or where they are switched off, and in the session
    that the system began with, whose file is empty.
    """
    try:
        text = _AUTOGROUP.read_text(encoding="ascii")
    except OSError:
        return None
    return int(text.rpartition(" ")[2]) if text.strip() else None
