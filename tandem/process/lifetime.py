"""Lifetime of every Tandem process: how it announces that it serves, when it stops, and how it fails.

SIGTERM begins the drain; a terminal's SIGINT is handled by the supervisor (a process started by hand treats it like
SIGTERM). SIGHUP reloads the settings that can change in a running process or, where a terminal closed, is like SIGTERM
(`tandem.process.hangup`). Exit codes: 0 after a drain, 1 after a fault, 2 for an invalid configuration.
"""

import argparse
import asyncio
import atexit
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tandem.errors import ConfigError, InvariantError
from tandem.process.hangup import on_hangup
from tandem.process.load_progress import LoadProgress, LoadReport
from tandem.telemetry.logs import configure
from tandem.values.roles import WorkerRole

if TYPE_CHECKING:
    from tandem.config.cluster import ClusterConfig

_log = logging.getLogger(__name__)


LOADING = "loading"
"""Key of a line about loading; see `load_progress`."""
REACHES = "reaches"
"""Key of a message with the addresses of the workers that answer a router."""
_FAULT_END_S = 5.0
"""Time for a process to end by itself after a fault; a hang would otherwise keep it for ever."""


class Lifetime:
    """Set once when the process should stop, with the fault that caused it, if any."""

    def __init__(self, *, force_end: Callable[[int], object] | None = None) -> None:
        """`force_end` gets the exit code when the process has not ended in time after a fault."""
        self._stop = asyncio.Event()
        self._rereads: list[Callable[[], object]] = []
        self._force_end = force_end
        self.fault: BaseException | None = None

    def stop(self) -> None:
        self._stop.set()

    def fail(self, fault: BaseException) -> None:
        """End at once, without a drain, because state can no longer be trusted."""
        if self.fault is None and self._force_end is not None:
            timer = threading.Timer(_FAULT_END_S, self._force_end, (1,))
            timer.daemon = True
            timer.start()
        self.fault = self.fault or fault
        self._stop.set()

    def on_reread(self, callback: Callable[[], object]) -> None:
        """Register a callback that reloads the files that may change while the process runs."""
        self._rereads.append(callback)

    def reread(self) -> None:
        """Make the process reload its files."""
        for callback in self._rereads:
            callback()

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, or drop it when the process should stop; return whether it was done. Raises the fault, and what
        the work raises.
        """
        done = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((done, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self.fault is not None:
                raise self.fault
            if done.done():
                done.result()
            return done.done()
        finally:
            stopping.cancel()
            done.cancel()

    async def wait(self) -> None:
        """Wait for `stop` or `fail`; raises the fault."""
        await self._stop.wait()
        if self.fault is not None:
            raise self.fault


class OneAtATime:
    """Runs a function in a thread, since a hanging file system must not block the loop. Requests made meanwhile are
    coalesced into one more run: a burst of signals costs two.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._turns: asyncio.Task[None] | None = None
        self._again = False

    def __call__(self) -> None:
        """Request a run; call it on the loop."""
        self._again = True
        if self._turns is None or self._turns.done():
            self._turns = asyncio.get_running_loop().create_task(self._take_turns())

    async def _take_turns(self) -> None:
        while self._again:
            self._again = False
            await asyncio.to_thread(self._work)


def load_progress(ready_fd: int | None) -> LoadProgress:
    """Report the loading of weights to the parent process, as JSON lines before its ready line.

    A parent that does not read them does not delay loading: lines are then dropped.
    """

    def publish(report: LoadReport) -> None:
        if ready_fd is None:
            return
        os.set_blocking(ready_fd, False)
        try:
            os.write(ready_fd, json.dumps({LOADING: report.as_json()}).encode() + b"\n")
        except OSError:
            pass  # the pipe is full, or its reader has gone
        finally:
            os.set_blocking(ready_fd, True)

    return LoadProgress(clock=time.monotonic, publish=publish, log=lambda report: _log.info("%s", report))


def announce(ready_fd: int | None, facts: Mapping[str, Any]) -> None:
    """Announce to the parent process, in one JSON line, that this one serves."""
    if ready_fd is None:
        return
    with os.fdopen(ready_fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(dict(facts)) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker process in its pool."""

    ready_fd: int | None = None
    index: int = 0
    address: str | None = None
    """host:port to listen on, port 0 for a free one; None for the configured address."""
    gpus: tuple[int, ...] = ()
    """Indices of GPUs on this host, one per rank; empty for those of the configuration."""
    gpu_sharers: int = 1
    """Number of workers on the most shared of `gpus`."""


def worker_main(role: WorkerRole, serve: Callable[["ClusterConfig", WorkerPlace, Lifetime], Awaitable[None]]) -> int:
    """Run a worker from its command line and return its exit code."""
    parser = _parser(f"{role.value}_worker", f"one {role.value} worker of a cluster")
    parser.add_argument("--index", type=int, default=0, help="which worker of the pool this is")
    parser.add_argument("--address", help="host:port where it listens, in place of that in the YAML; 0: a free port")
    parser.add_argument("--gpus", type=_gpus, default=(), help="which of this host's it computes on, such as 0,1")
    parser.add_argument("--gpu-sharers", type=int, default=1, help="workers that divide the memory of one of these")
    args = parser.parse_args()
    place = WorkerPlace(
        ready_fd=args.ready_fd,
        index=args.index,
        address=args.address,
        gpus=args.gpus,
        gpu_sharers=max(1, args.gpu_sharers),
    )
    return _run(args.config, f"{role.value}-{place.index}", lambda config, lifetime: serve(config, place, lifetime))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """One router process among those that share a host's ports."""

    ready_fd: int | None = None
    index: int = 0
    shared_folder: Path | None = None
    """Folder where the router processes find each other; None for a single one."""
    config_path: Path | None = None
    """Path of the configuration, for reloading."""


def router_main(serve: Callable[["ClusterConfig", RouterPlace, Lifetime], Awaitable[None]]) -> int:
    """Run a router from its command line and return its exit code."""
    parser = _parser("router", "the HTTP and gRPC servers of a cluster")
    parser.add_argument("--index", type=int, default=0, help="index of this process among those that share the ports")
    parser.add_argument(
        "--siblings", type=Path, help="folder that the router processes of one host share; without it there are none"
    )
    args = parser.parse_args()
    place = RouterPlace(ready_fd=args.ready_fd, index=args.index, shared_folder=args.siblings, config_path=args.config)
    name = "router" if place.shared_folder is None else f"router-{place.index}"
    return _run(args.config, name, lambda config, lifetime: serve(config, place, lifetime))


def end(code: int) -> NoReturn:
    """Exit with this code at once, after everything has been closed.

    Finalizing the interpreter costs a process that has imported torch half a second of processor time.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, required=True, help="the cluster's YAML")
    parser.add_argument("--ready-fd", type=int, help="where to tell, in one JSON line, that it serves")
    return parser


def _gpus(text: str) -> tuple[int, ...]:
    """Parse GPU indices from the command line. Raises ValueError."""
    gpus = tuple(int(part) for part in text.split(","))
    if min(gpus) < 0 or len(set(gpus)) < len(gpus):
        raise ValueError(text)
    return gpus


def _run(path: Path, name: str, main: Callable[["ClusterConfig", Lifetime], Awaitable[None]]) -> int:
    # Here, because GPU machines that only import this module need not have pydantic.
    from tandem.config.cluster import load

    try:
        config = load(path)
        configure(config.log_level, name, config.log_format)

        def begin(lifetime: Lifetime) -> Awaitable[None]:
            lifetime.on_reread(OneAtATime(lambda: _reread_log_level(path, name)))
            return main(config, lifetime)

        _runner()(_with_signals(begin))
    except Exception as caught:  # noqa: BLE001 - the process's outermost frame: tell it, and let the exit code tell
        error = _blamed(caught)
        if isinstance(error, (ConfigError, OSError)):
            sys.stderr.write(f"error: {error}\n")
            return 2 if isinstance(error, ConfigError) else 1
        _log.critical("this process cannot go on", exc_info=True)
        return 1
    return 0


def _reread_log_level(path: Path, name: str) -> None:
    from tandem.config.cluster import load

    try:
        config = load(path)
    except (ConfigError, OSError) as error:
        _log.error("%s; the previous settings stay in force", error)
        return
    configure(config.log_level, name, config.log_format)
    _log.info("reloaded log settings and, in a router, worker addresses and telemetry.sample_ratio")


def _blamed(caught: Exception) -> Exception:
    """Extract a ConfigError from the exception group of the tasks that found it."""
    error = caught
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, ConfigError) else caught


def _runner() -> Callable[[Any], None]:
    try:
        from uvloop import run as uvloop_run
    except ImportError:
        return asyncio.run
    return uvloop_run


async def _with_signals(main: Callable[[Lifetime], Awaitable[None]]) -> None:
    lifetime = Lifetime(force_end=os._exit)
    loop = asyncio.get_running_loop()
    # A callback that raised has no task to fail. Only a broken invariant ends the process: gRPC's own poller raises
    # harmless errors there.
    loop.set_exception_handler(lambda _loop, context: _on_stray(lifetime, context))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifetime.stop)
    on_hangup(loop, closed=lifetime.stop, reread=lifetime.reread)
    await main(lifetime)


def _on_stray(lifetime: Lifetime, context: dict[str, Any]) -> None:
    error = context.get("exception")
    _log.error("exception in a callback: %s", context.get("message"), exc_info=error)
    if isinstance(error, InvariantError):
        lifetime.fail(error)
