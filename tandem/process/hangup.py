"""What SIGHUP means. To a process with a terminal: that the terminal has closed, so it ends as upon a Ctrl-C.

To one without, as under systemd or in a container: that it is to read its files again, as `systemctl reload` asks. Who
was started to ignore it (`nohup`) does.
"""

import os
import signal
from collections.abc import Callable
from typing import Protocol

_OUTPUTS = (1, 2)


class Loop(Protocol):
    """Of an event loop what is needed here."""

    def add_signal_handler(self, sig: int, callback: Callable[[], object]) -> None: ...


def on_hangup(loop: Loop, *, closed: Callable[[], object], reread: Callable[[], object]) -> bool:
    """Call one of them when SIGHUP comes; False where it is ignored."""
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
    """Whether there is one whose end this process would be told of."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(shown: list[int]) -> None:
    """Write nowhere what was written to a terminal that is gone: each line would fail, and what says it with it."""
    for fd in shown:
        if not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
