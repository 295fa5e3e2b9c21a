"""Who goes first where engines share processors with event loops.

An engine computes for milliseconds at a stretch. A router or a worker's own event loop on the same processors needs
microseconds, at once: it says yes or no to clients, takes tokens on, tells peers that it lives. Without a difference
between them the system lets it wait for whole slices of an engine's time (measured in docs/measurements.md).
"""

import contextlib
import os
import sys
import threading

NICENESS = 5
"""A third of the share of a thread that is not nice, and only while both want the processor."""


def step_back() -> None:
    """Let the calling thread, and those that it starts, give way to others. Where a priority belongs to a whole process
    (anywhere but on Linux), or may not be set, nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
