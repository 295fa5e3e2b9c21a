"""`tandem up`: starts a cluster on this machine, shows its progress, keeps it running, and ends it on request.

The first Ctrl-C (or SIGTERM, or the end of the terminal) drains, the second kills.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from cluster.cli import banner
from cluster.control.server import ControlSocket, check_place
from cluster.doctor.checks import locks
from cluster.doctor.findings import Status
from cluster.processes.effective_config import module_command, resolve_model
from cluster.processes.launcher import Command, Launcher
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ClusterFailed, StoppedEarly
from cluster.supervisor.process_view import ProcessView
from cluster.supervisor.supervisor import Note, ProcessState, Role
from cluster.terminal_text import without_controls
from tandem.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.process.hangup import on_hangup
from tandem.process.lifetime import OneAtATime
from tandem.process.load_progress import LoadReport

EXIT_FAILED = 1
EXIT_KILLED = 130
LINE_S = 5.0
"""Seconds between two lines about loading weights, where no progress bar is shown."""
_STARTING = "starting; if kernels must be compiled first, this takes about a minute"
Body = Callable[[LocalCluster], Awaitable[int]]
"""Function that runs while the cluster serves; its result is the exit code."""
Again = Callable[[], ClusterConfig]
"""Function that reloads the user's configuration. Raises ConfigError and OSError."""


class ConsoleWatcher:
    """Shows spinners and progress bars while processes load, then their log lines and the supervisor's notices.

    Log lines written before everything serves are withheld, except warnings: a process that fails shows its own.
    """

    def __init__(self, console: Console, *, show_logs: bool) -> None:
        self._console = console
        self._show_logs = show_logs
        self._starting = True
        self._tasks: dict[str, TaskID] = {}
        self._lines_s: dict[str, float] = {}
        """Time of each process's last line about loading weights, or of its start."""
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.fields[name]:<12}", style="bold", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def all_ready(self) -> None:
        """End the start phase: close the spinners and let log lines through."""
        self._progress.stop()
        self._starting = False

    def on_state(self, view: ProcessView) -> None:
        """Update the process's spinner."""
        if not self._starting:
            return
        if view.state is ProcessState.STARTING and view.name not in self._tasks:
            # Without a total, the bar only shows that something is happening.
            self._tasks[view.name] = self._progress.add_task("", total=None, name=view.name)
            self._enter(view.name, "opening its ports" if view.role is Role.ROUTER else _STARTING)
        elif view.state is ProcessState.READY:
            text = f"ready, pid {view.pid}, {view.address}"
            self._progress.update(self._tasks[view.name], description=text, total=1.0, completed=1.0)
            if not self._console.is_terminal:
                self._print(Text(f"{view.name} {text}"))

    def on_loading(self, name: str, report: LoadReport) -> None:
        """Update the process's progress bar, or print a line every few seconds where there is none."""
        if not self._starting or name not in self._tasks:
            return
        if report.share == 1.0:
            self._progress.update(self._tasks[name], total=None, completed=0.0)
            self._enter(name, "weights loaded, allocating the KV cache")
            return
        self._progress.update(self._tasks[name], description=str(report), total=1.0, completed=report.share)
        now_s = asyncio.get_running_loop().time()
        if not self._console.is_terminal and now_s - self._lines_s.setdefault(name, now_s) >= LINE_S:
            self._lines_s[name] = now_s
            self._print(Text(f"{name} {report}"))

    def _enter(self, name: str, phase: str) -> None:
        """Show the process's new phase, in a line of its own where there is no bar."""
        self._progress.update(self._tasks[name], description=phase)
        if not self._console.is_terminal:
            self._print(Text(f"{name} {phase}"))

    def on_change(self, text: str) -> None:
        """Show the progress of a requested change."""
        self._print(Text(text, style="cyan"))

    def on_note(self, note: Note) -> None:
        """Show that a process died or came back, in any phase."""
        self._print(Text(f"{note.name} {note.text}", style="red" if note.is_error else "green"))

    def on_log(self, name: str, line: str) -> None:
        """Show a log line, dimmed, with the process's name unless the line contains it."""
        if self._starting and " WARNING " not in line:
            return
        if self._show_logs:
            text = line if name in line else f"{name} {line}"
            self._print(Text(without_controls(text), style="dim"))

    def _print(self, text: Text) -> None:
        # Called from the reader of a process's events, which must continue even if the terminal is gone.
        with suppress(OSError):
            self._console.print(text, soft_wrap=True)


@dataclass(slots=True)
class _Interrupts:
    """Counts the user's interrupts: the first drains, the second kills."""

    cluster: LocalCluster
    console: Console
    work: asyncio.Task[int] | None = None
    count: int = 0

    def __call__(self) -> None:
        """Handle an interrupt: drain first, then kill."""
        self.count += 1
        # The terminal may be gone and printing may block: act first.
        if self.count > 1:
            self.cluster.request_kill()
            self._say("killing", "red")
            return
        self.cluster.request_stop()
        if self.work is not None:
            self.work.cancel()
        self._say(f"\ndraining; {banner.STOP_HINT.partition('; ')[2]}", "yellow")

    def _say(self, text: str, style: str) -> None:
        with suppress(OSError):
            self.console.print(text, style=style)


class _Rereads:
    """Handle SIGHUP where there is no terminal: all processes reload the settings that may change while they run.

    The file is read in a thread, so that processes are supervised even if reading hangs.
    """

    def __init__(self, cluster: LocalCluster, console: Console, again: Again | None) -> None:
        self._cluster = cluster
        self._console = console
        self._again = again
        self._loop = asyncio.get_running_loop()
        self._turns = OneAtATime(self._read)

    def __call__(self) -> None:
        if self._again is None:
            self._cluster.request_reread()
        else:
            self._turns()

    def _read(self) -> None:
        assert self._again is not None  # noqa: S101  # narrows: the handler is installed only with it
        fresh: ClusterConfig | Exception
        try:
            fresh = self._again()
        except (ConfigError, OSError) as error:
            fresh = error
        with suppress(RuntimeError):  # the loop has ended in the meantime
            self._loop.call_soon_threadsafe(self._apply, fresh)

    def _apply(self, fresh: ClusterConfig | Exception) -> None:
        if self._cluster.is_ending:
            return
        try:
            if isinstance(fresh, Exception):
                raise fresh
            self._cluster.shared.apply_live_settings(fresh)
        except (ConfigError, OSError) as error:
            with suppress(OSError):
                self._console.print(Text(f"{error}; the configuration is unchanged", style="bold red"))
        self._cluster.request_reread()


async def serve(
    config: ClusterConfig,
    *,
    out: Console,
    err: Console,
    launcher: Launcher | None = None,
    again: Again | None = None,
) -> int:
    """Run a cluster until the user ends it, and return the exit code. Raises ConfigError before anything is started."""
    # Checked before a model is downloaded and loaded: the routers, which need this, start last.
    for found in await asyncio.to_thread(locks, config):
        if found.status is Status.FAIL:
            raise ConfigError(found.detail)
    check_place(config)
    resolved = resolve_model(config)

    async def body(cluster: LocalCluster) -> int:
        banner.print_banner(out, config, cluster.config, cluster.processes)
        await cluster.wait_stopped()
        return 0

    return await run_with(resolved, body, console=err, show_logs=True, launcher=launcher, again=again)


async def serve_routers(config: ClusterConfig, *, console: Console, again: Again | None = None) -> int:
    """Run this host's router processes only, until stopped, and return the exit code. Raises ConfigError."""

    check_place(config)

    async def body(cluster: LocalCluster) -> int:
        await cluster.wait_stopped()
        return 0

    resolved = resolve_model(config, runs_workers=False)
    return await run_with(resolved, body, console=console, show_logs=True, routers_only=True, again=again)


async def run_with(
    config: ClusterConfig,
    body: Body,
    *,
    console: Console,
    show_logs: bool,
    command: Command = module_command,
    routers_only: bool = False,
    launcher: Launcher | None = None,
    again: Again | None = None,
) -> int:
    """Run `body` while a cluster serves, drain it, and return the exit code. `again` reloads the configuration."""
    watcher = ConsoleWatcher(console, show_logs=show_logs)
    cluster = LocalCluster(config, watcher=watcher, command=command, routers_only=routers_only, launcher=launcher)
    interrupts = _Interrupts(cluster, console)
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    for signum in signals:
        loop.add_signal_handler(signum, interrupts)
    if on_hangup(loop, closed=interrupts, reread=_Rereads(cluster, console, again)):
        signals.append(signal.SIGHUP)
    try:
        with watcher:
            async with cluster, ControlSocket(cluster, report=watcher.on_change):
                watcher.all_ready()
                interrupts.work = asyncio.ensure_future(body(cluster))
                code = await _result(interrupts)
    except StoppedEarly:
        code = 0
    except ClusterFailed as error:
        reason, _, details = str(error).partition("\n")
        console.print(Text(reason, style="bold red"), soft_wrap=True)
        if details:
            console.print(Text(without_controls(details)), soft_wrap=True)
        return EXIT_FAILED
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
    return EXIT_KILLED if interrupts.count > 1 else code


async def _result(interrupts: _Interrupts) -> int:
    assert interrupts.work is not None  # noqa: S101  # narrows: set before this is called
    try:
        return await interrupts.work
    except asyncio.CancelledError:
        if interrupts.count == 0:
            raise
        return 0
