"""Counts the calls into a module: what is never called costs neither time nor memory."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def calls_into(*files: str) -> Iterator[Counter[str]]:
    """By name of the function, over all threads that begin a function meanwhile."""
    calls: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(files):
            calls[frame.f_code.co_name] += 1

    before = sys.getprofile()
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
