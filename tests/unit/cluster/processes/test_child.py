"""One child process: its messages reach the callbacks whole, in order and before its end."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from cluster.processes.child import MAX_LINE_BYTES, Callbacks, Child
from tandem.process.load_progress import LoadReport


class RecordedCallbacks:
    """All messages of one child."""

    def __init__(self):
        self.ready, self.lines, self.loading, self.news, self.status = [], [], [], [], None
        self.ended, self.serves, self.beats = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def callbacks(self):
        return Callbacks(
            on_loading=self.loading.append,
            on_ready=self.on_ready,
            on_beat=self.beats.set,
            on_news=self.news.append,
            on_log=self.lines.append,
            on_exit=self.on_exit,
        )

    def on_ready(self, info):
        self.ready.append(info)
        self.serves.set()

    def on_exit(self, status):
        self.status = status
        self.ended.set()


def spawn(code, recorded):
    script = "import os, signal, sys, time\nfd = int(sys.argv[1])\n" + code
    return Child(lambda fd: [sys.executable, "-I", "-S", "-c", script, str(fd)], dict(os.environ), recorded.callbacks())


async def run(code):
    recorded = RecordedCallbacks()
    spawn(code, recorded)
    await recorded.ended.wait()
    return recorded


async def test_child_output_is_delivered_before_exit():
    recorded = await run("os.write(fd, b'{\"a\": 1}\\n')\nprint('one\\n\\ntwo')\nsys.stderr.write('cut')\nsys.exit(4)")
    assert recorded.ready == [{"a": 1}]
    assert sorted(recorded.lines) == ["cut", "one", "two"]
    assert recorded.status == 4


async def test_child_long_output_is_delivered_whole():
    recorded = await run(f"print('x' * {MAX_LINE_BYTES * 20})\nprint('end')")
    assert "".join(recorded.lines) == "x" * MAX_LINE_BYTES * 20 + "end"
    assert max(map(len, recorded.lines)) <= MAX_LINE_BYTES + (1 << 16)


@pytest.mark.parametrize(
    "ready", ["b'[1]\\n'", "b'nonsense\\n'", "b'{\"loading\": 3}\\n'", 'b\'{"loading": {"share": 2, "left_s": 1}}\\n\'']
)
async def test_child_malformed_ready_line_is_fatal(ready):
    recorded = await run(f"os.write(fd, {ready})\nsignal.pause()")
    assert recorded.ready == []
    assert recorded.status == -signal.SIGKILL
    assert recorded.lines == ["the ready line is not a JSON object"]


async def test_child_ready_line_may_arrive_in_pieces():
    recorded = await run("os.write(fd, b'{\"a\":')\ntime.sleep(0.05)\nos.write(fd, b' 2}\\n')\nos.close(fd)")
    assert recorded.ready == [{"a": 2}]


async def test_child_load_reports_precede_ready_line():
    news = '{"loading": {"share": 0.5, "left_s": null}}\\n{"loading": {"share": 1.0, "left_s": 0.5}}\\n{"a": 2}\\n.'
    recorded = await run(f"os.write(fd, b'{news}')\nos.close(fd)")
    assert recorded.loading == [LoadReport(share=0.5, left_s=None), LoadReport(share=1.0, left_s=0.5)]
    assert recorded.ready == [{"a": 2}]


async def test_child_heartbeats_after_ready_line_are_reported():
    recorded = RecordedCallbacks()
    child = spawn("os.write(fd, b'{\"a\": 1}\\n')\nos.read(0, 1)\nwhile os.write(fd, b'.'): time.sleep(0.01)", recorded)
    for _ in range(3):
        await recorded.beats.wait()
        recorded.beats.clear()
    assert recorded.ready == [{"a": 1}]
    child.send(signal.SIGKILL)
    await recorded.ended.wait()


async def test_child_news_between_heartbeats_is_parsed_and_noise_ignored():
    news = '{"a": 1}\\n...\\n{"reaches": ["b:1"]}\\n..\\nnonsense\\n[1]\\n.\\n{"reaches":'
    first = f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])\nos.write(fd, b'{news}')\n"
    recorded = RecordedCallbacks()
    child = spawn(first + "signal.sigwait([signal.SIGHUP])\nos.write(fd, b' []}\\n.')", recorded)
    await recorded.serves.wait()  # one write, one read: what stands in the middle of a line has come, too
    child.send(signal.SIGHUP)
    await recorded.ended.wait()
    assert recorded.ready == [{"a": 1}]
    assert recorded.news == [{"reaches": ["b:1"]}, {"reaches": []}]


async def test_child_sighup_is_not_ignored_like_the_parents():
    """A child handles SIGHUP, also under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        recorded = RecordedCallbacks()
        child = spawn("os.write(fd, b'{}\\n')\nsignal.pause()", recorded)
        await recorded.serves.wait()
        child.send(signal.SIGHUP)
        await recorded.ended.wait()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert recorded.status == -signal.SIGHUP


async def test_child_closed_heartbeat_pipe_reports_exit_status():
    recorded = await run("os.write(fd, b'{}\\n.')\nos.close(fd)\nsys.exit(3)")
    assert (recorded.ready, recorded.status) == ([{}], 3)


async def test_child_exit_is_not_delayed_by_grandchild_with_pipe():
    code = "print('parent', flush=True)\npid = os.fork()\nif pid == 0:\n    signal.pause()\nprint(pid, flush=True)"
    recorded = await run(code)
    assert recorded.lines[0] == "parent"
    os.kill(int(recorded.lines[1]), signal.SIGKILL)


async def test_child_signals_are_sent_only_while_it_runs():
    recorded = RecordedCallbacks()
    child = spawn("os.write(fd, b'{}\\n')\nsignal.pause()", recorded)
    await recorded.serves.wait()
    child.send(signal.SIGTERM)
    await recorded.ended.wait()
    assert recorded.status == -signal.SIGTERM
    child.send(signal.SIGTERM)


@pytest.mark.parametrize("failing", ["os.pipe", "os.pidfd_open", "subprocess.Popen"])
async def test_child_failed_start_leaks_no_descriptor_or_process(monkeypatch, failing):
    """Starts are retried while descriptors are exhausted; each retry would leak more."""
    started, calls = [], []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    place, _, name = failing.rpartition(".")
    real = getattr(sys.modules[place], name)

    def fails(*arguments, **options):
        calls.append(arguments)
        if failing == "os.pipe" and len(calls) == 1:
            return real(*arguments, **options)
        raise OSError(24, "Too many open files")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys.modules[place], name, fails)
    with pytest.raises(OSError, match="Too many open files"):
        spawn("signal.pause()", RecordedCallbacks())
    monkeypatch.undo()
    assert set(os.listdir("/proc/self/fd")) == before
    assert len(started) == (failing == "os.pidfd_open")
    assert all(process.returncode is not None for process in started), "nor a process"
