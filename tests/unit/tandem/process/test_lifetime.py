"""The exit of a process that cannot start, as its parent sees it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.process.hangup import on_hangup
from tandem.process.lifetime import Lifetime, OneAtATime, router_main

pytestmark = pytest.mark.usefixtures("default_sighup")


async def _fail_in_a_task_group(*_: object) -> None:
    async with asyncio.TaskGroup():
        raise ConfigError("transfer.transport is 'nixl': it is not here")


async def _fail_in_two_tasks(*_: object) -> None:
    barrier = asyncio.Barrier(2)

    async def fail(error: Exception) -> None:
        await barrier.wait()
        raise error

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail(ConfigError("one thing")))
        tasks.create_task(fail(RuntimeError("another")))


def test_lifetime_wrong_setting_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr("tandem.process.lifetime.configure", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["router", "--config", str(path)])
    assert router_main(_fail_in_a_task_group) == 2
    assert capsys.readouterr().err == "error: transfer.transport is 'nixl': it is not here\n"
    assert router_main(_fail_in_two_tasks) == 1
    assert not capsys.readouterr().err.startswith("error:")


async def test_lifetime_hang_after_fault_forces_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.process.lifetime._FAULT_END_S", 0.01)
    ended: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    lifetime = Lifetime(force_end=lambda code: loop.call_soon_threadsafe(ended.put_nowait, code))
    for fault in (RuntimeError("it hangs"), RuntimeError("another")):
        lifetime.fail(fault)
    with pytest.raises(RuntimeError, match="it hangs"):
        await lifetime.wait()
    async with asyncio.timeout(60.0):
        assert await ended.get() == 1
    assert ended.empty()


@pytest.mark.parametrize(("has_terminal", "ends_by"), [(False, "read again"), (True, "told to stop")])
def test_lifetime_sighup_reloads_or_stops_with_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_terminal: bool, ends_by: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{}", encoding="utf-8")
    levels, ends = list[str](), list[str]()

    async def serve(_config: object, _place: object, lifetime: Lifetime) -> None:
        loop, read_again, levelled = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def configured(level: str, _name: str, _style: str) -> None:
            levels.append(level)
            loop.call_soon_threadsafe(levelled.set)

        monkeypatch.setattr("tandem.process.lifetime.configure", configured)
        lifetime.on_reread(read_again.set)
        stopped = asyncio.create_task(lifetime.wait())
        reread = asyncio.create_task(read_again.wait())
        path.write_text("{log_level: debug}", encoding="utf-8")
        os.kill(os.getpid(), signal.SIGHUP)
        done, _ = await asyncio.wait([stopped, reread], timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
        ends.append("told to stop" if stopped in done else "read again")
        if reread in done:
            await levelled.wait()
            for task in (stopped, reread):
                task.cancel()

    monkeypatch.setattr("tandem.process.hangup.has_terminal", lambda: has_terminal)
    monkeypatch.setattr("tandem.process.lifetime.configure", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["router", "--config", str(path)])
    assert router_main(serve) == 0
    assert ends == [ends_by]
    assert levels == ([] if has_terminal else ["debug"])


def test_lifetime_ignored_sighup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)

    class Untouched:
        def add_signal_handler(self, *_: object) -> None:
            raise AssertionError

    assert not on_hangup(Untouched(), closed=lambda: None, reread=lambda: None)


def test_one_at_a_time_coalesces_pending_calls():
    begun, go_on, turns = threading.Event(), threading.Event(), []

    def work() -> None:
        turns.append(None)
        begun.set()
        assert go_on.wait(10)

    async def storm() -> None:
        read_again = OneAtATime(work)
        read_again()
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(300):
            read_again()
        go_on.set()
        await read_again._turns

    asyncio.run(storm())
    assert len(turns) == 2


def test_lifetime_exit_flushes_output_and_skips_teardown():
    code = (
        "import atexit, tandem.process.lifetime\n"
        "class Kept:\n"
        "    def __del__(self): print('taken apart')\n"
        "kept = Kept()\n"
        "atexit.register(print, 'told of the end')\n"
        "print('said')\n"
        "tandem.process.lifetime.end(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\ntold of the end\n", "")


async def test_lifetime_work_is_done_unless_the_process_stops() -> None:
    lifetime, begun = Lifetime(), asyncio.Event()
    assert await lifetime.unless_stopped(asyncio.sleep(0))

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def wrong() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        await lifetime.unless_stopped(wrong())
    working = asyncio.create_task(lifetime.unless_stopped(endless()))
    await begun.wait()
    lifetime.stop()
    assert not await working, "a worker that was not checked does not serve"


async def test_lifetime_fault_ends_work_that_waits_for_what_has_failed() -> None:
    lifetime = Lifetime()
    working = asyncio.create_task(lifetime.unless_stopped(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    lifetime.fail(RuntimeError("the engine"))
    with pytest.raises(RuntimeError, match="the engine"):
        await working
