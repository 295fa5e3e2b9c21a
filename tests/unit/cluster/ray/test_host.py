"""The actor's work without Ray: a process is started, reported, signalled and not left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.ray import host as ray_host
from cluster.ray.host import Outbox, WorkerHost
from tandem.config.cluster import dump, load
from tests.support.cluster.clock_that_jumps import ClockThatJumps

WAIT_S = 30.0
SPEAKER = """
import json, os, signal, sys
config, ready = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGHUP, lambda *_: print("again:", "debug" in open(config).read(), flush=True))
print("read:", len(open(config).read()) > 0, "RAY_AUTH_TOKEN" in os.environ, flush=True)
os.write(ready, json.dumps({"address": sys.argv[3]}).encode() + b"\\n")
while True:
    signal.pause()
"""


@pytest.fixture
def speaker(monkeypatch):
    def command(plan, path, ready_fd):
        return [sys.executable, "-c", SPEAKER, str(path), str(ready_fd), plan.address]

    monkeypatch.setattr(ray_host, "_command", command)


async def listen_until(host, words, wanted):
    """Listen until this has been reported."""
    async with asyncio.timeout(WAIT_S):
        while wanted not in words:
            words += await host.listen()


async def test_ray_host_starts_reports_and_signals_its_worker(speaker, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    host, words = WorkerHost(WAIT_S), []
    pid = await host.start("decode", 3, "10.0.0.7:0", dump(load(None, {"secret": "s" * 32})))
    await listen_until(host, words, ("ready", {"address": "10.0.0.7:0"}))
    await listen_until(host, words, ("log", "read: True False"))
    assert psutil.Process(pid).ppid() == os.getpid()
    await host.configure(dump(load(None, {"log_level": "debug", "secret": "s" * 32})))
    await host.send(signal.SIGHUP)
    await listen_until(host, words, ("log", "again: True"))
    await host.send(signal.SIGTERM)
    await listen_until(host, words, ("exit", -signal.SIGTERM))
    assert words[-1] == ("exit", -signal.SIGTERM)
    await host.send(signal.SIGKILL)  # it has ended: nothing happens
    host._look.cancel()


async def test_ray_host_configuration_is_only_in_memory(speaker, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    host, words = WorkerHost(WAIT_S), []
    pid = await host.start("decode", 0, "127.0.0.1:0", dump(load(None, {"secret": "the-secret-of-all"})))
    await listen_until(host, words, ("log", "read: True False"))
    path = Path(psutil.Process(pid).cmdline()[-3])
    assert "the-secret-of-all" in await asyncio.to_thread(path.read_text)
    assert path.parts[:3] == ("/", "proc", str(os.getpid()))
    assert os.readlink(path).startswith("/memfd:")
    assert list(tmp_path.iterdir()) == []
    await host.send(signal.SIGKILL)
    await listen_until(host, words, ("exit", -signal.SIGKILL))
    host._look.cancel()


def test_ray_host_without_calls_ends_with_its_worker():
    code = f"""
import asyncio, sys
from cluster.ray import host as ray_host
from tandem.config.cluster import dump, load
ray_host._command = lambda plan, path, ready_fd: [sys.executable, "-c", {SPEAKER!r}, str(path), str(ready_fd), "x"]
async def main():
    host = ray_host.WorkerHost(0.2)
    print(await host.start("decode", 0, "127.0.0.1:0", dump(load(None))), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(WAIT_S)


def test_ray_host_lease_excludes_actor_pauses(speaker, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    async def pass_by(loop, away_s):
        loop.away_s += away_s
        turned = loop.create_future()
        loop.call_later(0, loop.call_soon, turned.set_result, None)  # behind every timer that is due
        await turned

    async def scenario():
        loop, host = asyncio.get_running_loop(), WorkerHost(60.0)
        pid = await host.start("decode", 0, "127.0.0.1:0", dump(load(None)))
        await pass_by(loop, 600.0)
        assert ended == []
        for _ in range(10):
            await pass_by(loop, 8.0)
        assert set(ended) == {1}, "nobody has listened for a minute"
        host._look.cancel()
        psutil.Process(pid).kill()
        async with asyncio.timeout(WAIT_S):
            while ("exit", -signal.SIGKILL) not in await host.listen():
                pass
        host._look.cancel()

    with asyncio.Runner(loop_factory=ClockThatJumps) as runner:
        runner.run(scenario())


def test_ray_outbox_bounds_unfetched_lines_and_reports_drops():
    outbox = Outbox(max_log_bytes=100)
    for number in range(1000):
        outbox.log(f"line {number:03}")
    words = outbox.drain()
    assert words[0] == ("log", "988 lines were dropped because they were not fetched in time")
    assert [line for _, line in words[1:]] == [f"line {number:03}" for number in range(988, 1000)]
    assert not outbox
    assert outbox.drain() == []


def test_ray_outbox_reports_the_end_last_and_heartbeats_once():
    outbox = Outbox()
    outbox.end(1)
    outbox.beat()
    outbox.beat()
    outbox.say("ready", {})
    outbox.log("the last word")
    assert outbox
    assert outbox.drain() == [("log", "the last word"), ("ready", {}), ("beat", None), ("exit", 1)]
