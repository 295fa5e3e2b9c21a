"""Who goes first where engines share processors with event loops.

An engine computes for milliseconds at a stretch. A router or a worker's own event loop on the same processors needs
microseconds, at once: it answers clients, passes tokens on, and sends heartbeats to peers. Without a difference
between them the system lets it wait for whole slices of an engine's time (measured in docs/extend/measurements.md).

Linux may divide the processors between sessions first (autogroups), and niceness counts within each alone. Workers that
`tandem up` starts lead sessions of their own, so there the whole session steps back as well: beside the router's.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

NICENESS = 5
"""A third of the share of a thread that is not nice, and only while both want the processor."""
_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 10
_BETWEEN_TRIES_S = 0.11
"""Who is not root may set one session of the whole system in a tenth of a second."""


def step_back() -> None:
    """Let the calling thread, and those that it starts, give way to others. Where a priority belongs to a whole process
    (anywhere but on Linux), or may not be set, nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
    # A session that another process leads, a shell's, is not ours to slow down.
    if os.getsid(0) == os.getpid():
        _session_steps_back()


def _session_steps_back() -> None:
    """Nothing changes where the system has no autogroups, or they may not be set."""
    for _ in range(_TRIES):
        try:
            niceness = session_niceness()
            if niceness is not None and niceness < NICENESS:
                _AUTOGROUP.write_text(f"{NICENESS}", encoding="ascii")
        except BlockingIOError:
            # Before the engine has anything to do: nobody waits for this thread.
            time.sleep(_BETWEEN_TRIES_S)
        except OSError:
            return
        else:
            return


def session_niceness() -> int | None:
    """Of the session's autogroup. None where there is none: a system without them, one that has them switched off, or
    the session that it began with, whose file is there and empty."""
    try:
        text = _AUTOGROUP.read_text(encoding="ascii")
    except OSError:
        return None
    return int(text.rpartition(" ")[2]) if text.strip() else None
