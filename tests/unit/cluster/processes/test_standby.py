"""Standby workers: used at a worker's start, replaced, and ended with their cluster."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.processes import launcher as launching
from cluster.processes import standby
from cluster.processes.child import Callbacks, Child
from cluster.processes.effective_config import make_effective, plan_processes
from cluster.processes.launcher import LocalLauncher
from cluster.processes.standby import MAX_FAILURES, StandbyWorkers
from cluster.supervisor.supervisor import Role
from tandem.config.cluster import load
from tandem.values.roles import WorkerRole
from tests.unit.worker.test_gpus import FakeHost

ECHO = """
import json, os, sys
order = json.loads(sys.stdin.readline())
os.write(int(sys.argv[1]), (json.dumps(order) + "\\n").encode())
print("serves")
sys.stdin.read()
"""
ENDS = "import sys; print('no module named torch'); sys.exit(3)"
SERVES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
os.write(int(sys.argv[1]), b"{}\\n")
signal.pause()
"""
BECOMES = f"import sys; sys.stdin.readline()\n{SERVES}"


class RecordedCallbacks:
    """All messages of one worker."""

    def __init__(self) -> None:
        self.ready: list[object] = []
        self.lines: list[str] = []
        self.status: int | None = None
        self.changed = asyncio.Event()

    def callbacks(self) -> Callbacks:
        def note(kept: list) -> object:
            def call(value: object) -> None:
                kept.append(value)
                self.changed.set()

            return call

        def ended(status: int) -> None:
            self.status = status
            self.changed.set()

        ignored: list[object] = []
        return Callbacks(
            on_loading=note(ignored),
            on_ready=note(self.ready),
            on_beat=lambda: None,
            on_news=note(ignored),
            on_log=note(self.lines),
            on_exit=ended,
        )

    async def until(self, reached) -> None:
        async with asyncio.timeout(60):
            while not reached():
                self.changed.clear()
                await self.changed.wait()


def make(monkeypatch: pytest.MonkeyPatch, script: str, count: int = 1) -> StandbyWorkers:
    monkeypatch.setattr(standby, "CALM_S", 0.0)
    monkeypatch.setattr(standby, "_command", lambda ready_fd: [sys.executable, "-I", "-S", "-c", script, str(ready_fd)])
    return StandbyWorkers(count, lambda: os.environ)


async def until_waiting(workers: StandbyWorkers, count: int, other_than: frozenset[int] = frozenset()) -> list[int]:
    async with asyncio.timeout(60):
        while len(pids := [pid for pid in workers.pids if pid not in other_than]) < count:  # noqa: ASYNC110 - it says nothing when it has one
            await asyncio.sleep(0.01)
    return pids


def serve_something(workers: StandbyWorkers, name: str = "decode-0") -> Callbacks:
    """A process that started has become ready."""
    callbacks = workers.observed(name, RecordedCallbacks().callbacks())
    callbacks.on_ready({})
    return callbacks


async def test_standby_becomes_worker_when_given_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(monkeypatch, ECHO)
    serve_something(workers)
    [pid] = await until_waiting(workers, 1)
    recorded = RecordedCallbacks()
    child = workers.start(WorkerRole.DECODE, ["--index", "1"], recorded.callbacks())
    assert child is not None
    assert child.pid == pid
    await recorded.until(lambda: recorded.ready and recorded.status is not None)
    assert recorded.ready == [{"role": "decode", "arguments": ["--index", "1"]}]
    assert recorded.lines == ["serves"]
    assert recorded.status == 0
    workers.close()


async def test_standby_is_replaced_once_its_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(monkeypatch, ECHO)
    serve_something(workers)
    [first] = await until_waiting(workers, 1)
    recorded = RecordedCallbacks()
    callbacks = workers.observed("decode-1", recorded.callbacks())
    assert workers.start(WorkerRole.DECODE, [], callbacks) is not None
    assert workers.pids == []
    await recorded.until(lambda: recorded.ready and recorded.status is not None)
    assert await until_waiting(workers, 1, frozenset({first}))
    workers.close()


async def test_standby_is_not_started_while_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(monkeypatch, ECHO)
    workers.observed("decode-1", RecordedCallbacks().callbacks())
    serve_something(workers, "decode-0")
    await asyncio.sleep(0.05)
    assert workers.pids == []
    workers.close()


async def test_standby_killed_while_waiting_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(monkeypatch, ECHO)
    serve_something(workers)
    [pid] = await until_waiting(workers, 1)
    os.kill(pid, signal.SIGKILL)
    assert await until_waiting(workers, 1, frozenset({pid}))
    workers.close()


async def test_standbys_that_keep_dying_are_given_up_with_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[int] = []
    workers = make(monkeypatch, ENDS)
    command = standby._command
    monkeypatch.setattr(standby, "_command", lambda ready_fd: [started.append(ready_fd), *command(ready_fd)][1:])
    serve_something(workers)
    async with asyncio.timeout(60):
        while len(started) < MAX_FAILURES or workers.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(started) == MAX_FAILURES
    assert workers.start(WorkerRole.PREFILL, [], RecordedCallbacks().callbacks()) is None
    workers.close()
    assert caplog.text.count("standby: no module named torch") == MAX_FAILURES
    assert caplog.text.count("ended by itself with status 3") == MAX_FAILURES
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert ["no more are started" in one for one in errors] == [True]


async def test_standbys_that_fail_to_start_are_given_up_with_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    workers = make(monkeypatch, ECHO)
    monkeypatch.setattr(standby, "Child", refuse)
    serve_something(workers)
    async with asyncio.timeout(60):
        while "no more are started" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert caplog.text.count("cannot start a standby worker: [Errno 11]") == MAX_FAILURES
    workers.close()


async def test_standby_close_ends_waiting_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(monkeypatch, ECHO, count=2)
    serve_something(workers)
    pids = await until_waiting(workers, 2)
    workers.close()
    assert workers.pids == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_standby_exits_when_stdin_closes() -> None:
    command = standby._command(1)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(60):
        assert await process.wait() == 0


SHOWS = """
import sys
from cluster.processes import standby
standby._show_command_line([sys.executable, "-m", "decode_worker", *sys.stdin.readline().split()])
print(len(sys.argv), flush=True)
sys.stdin.read()
"""


async def command_line_shown(arguments: list[str]) -> list[str]:
    """The command line in `ps` of a process that has become a decode worker with these arguments."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", SHOWS, *standby._command(9)[3:]]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(" ".join(arguments).encode() + b"\n")
    async with asyncio.timeout(60):
        assert int(await process.stdout.readline()) == len(command) - 2
    shown = await asyncio.to_thread(Path(f"/proc/{process.pid}/cmdline").read_bytes)
    process.stdin.close()
    assert await process.wait() == 0
    return shown.decode().rstrip(" \0").split("\0")


@pytest.mark.parametrize("length", [8, 300, 9000])
async def test_standby_command_line_becomes_that_of_worker(length: int) -> None:
    arguments = ["--index", "0", "--config", "/" + "c" * length]
    shown = await command_line_shown(arguments)
    expected = [sys.executable, "-m", "decode_worker", *arguments]
    if length < 1000:
        assert shown == expected
    else:
        assert shown[:-1] == expected[:-1]
        assert expected[-1].startswith(shown[-1])


class Cluster:
    """A launcher of processes that serve at once, and its standbys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launching, "module_command", self._command)
        monkeypatch.setattr(launching, "StandbyWorkers", lambda count, _: make(monkeypatch, BECOMES, count))
        self.launcher = LocalLauncher(self._command, gpus=FakeHost(0))
        config = make_effective(load(None, {"standby_workers": 1, "decode.replicas": 1, "prefill.replicas": 0}))
        self.launcher.open(config)
        self.plan = next(plan for plan in plan_processes(config) if plan.role is Role.DECODE)
        assert self.launcher._standby is not None
        self.standbys = self.launcher._standby
        self.children: list[Child] = []

    @staticmethod
    def _command(_plan: object, _path: object, ready_fd: int) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", SERVES, str(ready_fd)]

    async def start(self) -> int:
        """The pid of the worker, which serves."""
        recorded = RecordedCallbacks()
        child = self.launcher.start(self.plan, recorded.callbacks())
        self.children.append(child)
        await recorded.until(lambda: recorded.ready)
        self.recorded = recorded
        return child.pid

    async def end(self, signum: signal.Signals) -> None:
        self.children[-1].send(signum)
        await self.recorded.until(lambda: self.recorded.status is not None)

    def close(self) -> None:
        for child in self.children:
            child.discard()
        self.launcher.close()


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster(monkeypatch)
    yield made
    made.close()


async def test_standby_replaces_dead_worker(cluster: Cluster) -> None:
    await cluster.start()
    [waiting] = await until_waiting(cluster.standbys, 1)
    await cluster.end(signal.SIGKILL)
    assert await cluster.start() == waiting


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_standby_is_not_used_for_user_restart(cluster: Cluster, is_replaced: bool) -> None:
    await cluster.start()
    [waiting] = await until_waiting(cluster.standbys, 1)
    if is_replaced:
        cluster.launcher.replace(cluster.plan.name, "decode-9")
    else:
        await cluster.end(signal.SIGTERM)
    assert await cluster.start() != waiting
    # It may have imported another version; the next one has not.
    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)
    assert await until_waiting(cluster.standbys, 1, frozenset({waiting}))
