"""Handles SIGHUP. For a process with a terminal it means that the terminal has closed: it ends as on Ctrl-C.

For one without, as under systemd or in a container, it means reload, as sent by `systemctl reload`. A process that was
started to ignore it (`nohup`) does so.
"""

import os
import signal
from collections.abc import Callable
from typing import Protocol

_OUTPUTS = (1, 2)


class Loop(Protocol):
    """The part of an event loop that is used here."""

    def add_signal_handler(self, sig: int, callback: Callable[[], object]) -> None: ...


def on_hangup(loop: Loop, *, closed: Callable[[], object], reread: Callable[[], object]) -> bool:
    """Call one of the callbacks on SIGHUP. Returns False where SIGHUP is ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    if not has_terminal():
        loop.add_signal_handler(signal.SIGHUP, reread)
        return True
    shown = [fd for fd in _OUTPUTS if os.isatty(fd)]

    def hung_up() -> None:
        _leave(shown)
        closed()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    return True


def has_terminal() -> bool:
    """Whether this process has a terminal whose end would reach it as SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(shown: list[int]) -> None:
    """Redirect output from a terminal that is gone to /dev/null: each write, and its caller, would fail."""
    for fd in shown:
        if not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
