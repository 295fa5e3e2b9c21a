"""The process around one end of a transfer: JSON lines in, JSON lines out. Standard library only.

It runs in the contestant's own environment, where Tandem need not be installed, so it is started by its path and loads
the end's file by path, too. The first input line has that file, the name of the class in it, and the pools to map; each
further line names a method and its arguments. The end of the input ends the process, and so does the death of its
parent, even while this process is frozen.
"""

import ctypes
import importlib.util
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1


class End(Protocol):
    """Interface of the classes `Sender` and `Receiver` of an end's file, constructed with options and pools."""

    about: Mapping[str, Any]
    """Versions and settings, for the report."""

    def open(self) -> Any:
        """Return what the sender must know to connect; called once, for the receiver only."""
        ...

    def connect(self, address: Any) -> None:
        """Connect; called once for both ends at the same time, after `open`."""
        ...

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> Any:
        """Prepare a case, the receiver (with None) first; its result is the sender's ticket. Not timed."""
        ...

    def run(self, name: str) -> float | None:
        """Move the prepared case; both ends at the same time. The sender returns the seconds that it took."""
        ...


class Pool:
    """Shared memory, mapped with every page present."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.view = memoryview(mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))


def main() -> int:
    """Serve until the input ends; return 1 after reporting a failure of the end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print freely: keep the channel of the answers separate.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        options = json.loads(sys.stdin.readline())
        started_s = time.monotonic()
        pools = {name: Pool(path, options["pool_bytes"]) for name, path in options["pools"].items()}
        end = _load(options["file"], options["class"])(options, pools)
        reply({"about": dict(end.about), "load_s": time.monotonic() - started_s})
        for line in sys.stdin:
            call = json.loads(line)
            if call["do"] not in ("open", "connect", "prepare", "run"):
                raise ValueError(f"unknown method {call['do']}")
            reply({"result": getattr(end, call["do"])(**call["with"])})
    except Exception as error:  # noqa: BLE001  # the process's outermost frame: the parent must be notified
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"[:500]})
        return 1
    return 0


def _load(file: str, name: str) -> type[Any]:
    spec = importlib.util.spec_from_file_location("end", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    end: type[Any] = getattr(module, name)
    return end


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Libraries with threads of their own may not end: their resources end with the process.
    os._exit(code)
