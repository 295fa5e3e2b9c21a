"""Runs one child process: starts, reads, signals and reaps it, all through callbacks on the running loop.

A child announces that it serves by one JSON line on a pipe (`--ready-fd`). It may report how its weights load before
(`tandem.process.lifetime.load_progress`) and send heartbeats afterwards (`tandem.process.heartbeat`); stdout and
stderr come back as log lines. It leads its own session, so that a terminal's Ctrl-C reaches only the supervisor, and
it asks the kernel for SIGKILL should the supervisor vanish. Signals go through `subprocess.Popen`, which never signals
a pid that was reaped.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tandem.errors import InvariantError
from tandem.process.lifetime import LOADING
from tandem.process.load_progress import LoadReport

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 14
"""Maximum bytes of a log line; a longer one is split."""
MAX_READY_BYTES = 1 << 16
_BEATS = b"."

# Run by an isolated interpreter that then becomes the child: a preexec_fn would do the same, but it forces a full fork
# of a process with threads. The check of getppid covers a supervisor that died before prctl was called. SIGHUP is reset
# because only the supervisor sends it, when a file has changed, even where `nohup` made it ignored.
_SHIM = (
    "import _signal, ctypes, os, sys\n"
    "parent = int(sys.argv[1])\n"
    "PR_SET_PDEATHSIG, SIGKILL = 1, 9\n"
    "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)\n"
    "_signal.signal(_signal.SIGHUP, _signal.SIG_DFL)\n"
    "os._exit(1) if os.getppid() != parent else os.execv(sys.argv[2], sys.argv[2:])\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Callbacks for a child's events, called on the event loop."""

    on_loading: Callable[[LoadReport], None]
    on_ready: Callable[[Mapping[str, Any]], None]
    on_beat: Callable[[], None]
    on_news: Callable[[Mapping[str, Any]], None]
    """Called with later messages of a serving process (`tandem.process.heartbeat`)."""
    on_log: Callable[[str], None]
    on_exit: Callable[[int], None]
    """Called last, after every log line that was written before the end."""
    on_room: Callable[[bool], None] = lambda _: None
    """Called with whether there is room for a process that may have to wait for it; never for a local child."""


class Child:
    """Process that is running. Needs a running event loop; raises OSError when it cannot be started.

    The kernel ties the child to the *thread* that started it: use the thread that lives longest.
    """

    def __init__(
        self,
        argv: Callable[[int], Sequence[str]],
        env: Mapping[str, str],
        callbacks: Callbacks,
        *,
        takes_stdin: bool = False,
    ) -> None:
        """`argv` gets the descriptor for the ready line. `takes_stdin`: the child reads what `write_stdin` writes."""
        self._callbacks = callbacks
        self._loop = asyncio.get_running_loop()
        self._ready = bytearray()
        self._is_announced = False
        self._log = bytearray()
        with ExitStack() as theirs, ExitStack() as ours:
            self._ready_fd, ready_child = _pipe(ours, theirs)
            self._log_fd, log_child = _pipe(ours, theirs)
            command = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *argv(ready_child)]
            self._process = subprocess.Popen(  # noqa: S603  # our own modules, no shell
                command,
                stdin=subprocess.PIPE if takes_stdin else subprocess.DEVNULL,
                stdout=log_child,
                stderr=log_child,
                env=dict(env),
                pass_fds=(ready_child,),
                start_new_session=True,
            )
            ours.callback(self._process.wait)
            ours.callback(self._process.kill)
            self._pid_fd = os.pidfd_open(self._process.pid)
            ours.pop_all()  # nothing has failed: keep them open
        self._open_fds = {self._ready_fd, self._log_fd, self._pid_fd}
        os.set_blocking(self._ready_fd, False)
        os.set_blocking(self._log_fd, False)
        self._loop.add_reader(self._ready_fd, self._read_ready)
        self._loop.add_reader(self._log_fd, self._read_log)
        self._loop.add_reader(self._pid_fd, self._exited)

    @property
    def pid(self) -> int:
        """Process id of the child itself, since the shim becomes it by exec."""
        return self._process.pid

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the child; does nothing once it has ended."""
        self._process.send_signal(signum)

    def write_stdin(self, data: bytes) -> bool:
        """Write a few bytes to its stdin and close that; False when it has ended."""
        if self._process.stdin is None:
            raise InvariantError("this child has no stdin")
        try:
            with self._process.stdin as stdin:
                stdin.write(data)
        except OSError:
            return False
        return True

    def discard(self) -> None:
        """Kill the child without further callbacks."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        for fd in tuple(self._open_fds):
            self._close(fd)

    def _read_ready(self) -> None:
        data = _read(self._ready_fd)
        if data is None:
            return
        if not data:
            self._close(self._ready_fd)
        if self._is_announced and data:
            self._callbacks.on_beat()
        self._ready += data
        while b"\n" in self._ready:
            line, _, self._ready = self._ready.partition(b"\n")
            (self._hear if self._is_announced else self._take)(bytes(line))
        if self._is_announced:
            self._ready = self._ready.lstrip(_BEATS)
        if data and len(self._ready) > MAX_READY_BYTES:
            self._close(self._ready_fd)

    def _take(self, line: bytes) -> None:
        """Handle a line about loading, or the ready line."""
        info, report = None, None
        try:
            info = json.loads(line)
            report = LoadReport.read(info[LOADING]) if info.keys() == {LOADING} else None
        except (LookupError, TypeError, ValueError, AttributeError):
            info = None
        if report is not None:
            self._callbacks.on_loading(report)
            return
        self._is_announced = True
        if info is not None:
            self._callbacks.on_ready(info)
        else:
            self._callbacks.on_log("the ready line is not a JSON object")
            self.send(signal.SIGKILL)

    def _hear(self, line: bytes) -> None:
        """Handle messages or heartbeats of a serving child."""
        try:
            news = json.loads(line.strip(_BEATS) or b"{}")
        except ValueError:
            return
        if isinstance(news, dict) and news:
            self._callbacks.on_news(news)

    def _read_log(self) -> bool:
        """Pass on complete lines; return True when there may be more."""
        data = _read(self._log_fd)
        if data is None:
            return False
        self._log += data
        *lines, rest = self._log.split(b"\n")
        if not data or len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], bytearray()
        self._log = bytearray(rest)
        if not data:
            self._close(self._log_fd)
        for line in lines:
            if line.strip():
                self._callbacks.on_log(line.decode(errors="replace").rstrip())
        return bool(data)

    def _exited(self) -> None:
        status = self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._ready_fd in self._open_fds and not self._is_announced:
            self._read_ready()
        while self._log_fd in self._open_fds and self._read_log():
            pass
        if self._log:  # a grandchild may hold the pipe open, so its end is not awaited
            self._callbacks.on_log(self._log.decode(errors="replace").rstrip())
        for fd in tuple(self._open_fds):
            self._close(fd)
        self._callbacks.on_exit(status)

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._open_fds.discard(fd)


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    """Open a pipe; return our end for reading and the child's end, each closed with its stack."""
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    return read, write


def _read(fd: int) -> bytes | None:
    """Read bytes: empty at the end of the file, None when nothing is available now."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
