"""A whole local cluster of real, tiny processes."""

import asyncio
import io
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli.up import run_with
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ClusterFailed, StoppedEarly
from cluster.supervisor.process_view import SilentWatcher
from cluster.supervisor.supervisor import ProcessState, RestartPolicy, Role
from tests.support.cluster.fake_cluster import fake_command, fake_config

pytestmark = pytest.mark.usefixtures("default_sighup")

ROOT = Path(__file__).resolve().parents[4]
POLICY = RestartPolicy(stop_early_s=0.5, backoff_s=0.01, max_rapid_deaths=2, start_timeout_s=30)


class Recorder(SilentWatcher):
    """Records what a cluster reports."""

    def __init__(self):
        self.notes, self.lines, self.views = [], [], []
        self.heard = asyncio.Event()

    def on_state(self, view):
        self.views.append(view)

    def on_note(self, note):
        self.notes.append(f"{note.name} {note.text}")

    def on_log(self, name, line):
        self.lines.append((name, line))
        if name == "decode-0":
            self.heard.set()


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal"


def make(journal, modes=None, *, watcher=None, policy=POLICY, **counts):
    command = fake_command(journal, modes)
    return LocalCluster(fake_config(**counts), command=command, policy=policy, watcher=watcher)


def events(journal):
    return [" ".join(line.split()[:2]) for line in journal.read_text().splitlines()]


def pids(journal):
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [int(line.split()[2]) for line in lines if " started " in line]


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


async def test_local_cluster_starts_serves_and_stops_in_order(journal):
    watcher = Recorder()
    async with make(journal, watcher=watcher, prefill=2, decode=2) as cluster:
        assert [view.name for view in cluster.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert {view.state for view in cluster.processes} == {ProcessState.READY}
        assert sorted(view.pid for view in cluster.processes) == sorted(pids(journal))
        assert len({view.address for view in cluster.processes}) == 5
        assert cluster.workers[3].worker_id == "w-decode-1"
        assert cluster.processes[-1].role is Role.ROUTER
        assert cluster.http_url == f"http://127.0.0.1:{cluster.config.router.port}"
        assert cluster.config.router.port != cluster.config.router.grpc_port
        config_path = cluster.config_path
        directory = config_path.parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert config_path.stat().st_mode & 0o777 == 0o600
    seen = events(journal)
    assert seen[4] == "router started"
    assert seen[5] == "router term"
    assert sorted(seen[6:]) == ["decode-0 term", "decode-1 term", "prefill-0 term", "prefill-1 term"]
    assert not directory.exists()
    assert all(gone(pid) for pid in pids(journal))
    assert ("decode-0", "decode-0 says hello") in watcher.lines
    assert cluster.failure is None


async def test_local_cluster_killed_worker_restarts_on_same_address(journal):
    watcher = Recorder()
    async with make(journal, watcher=watcher) as cluster:
        before = cluster.workers[1]
        cluster.kill("w-decode-0")
        after = await cluster.wait_ready("decode-0", after_pid=before.pid)
        assert after.address == before.address
        assert after.pid != before.pid
        assert watcher.notes[0].startswith("decode-0 was ended by SIGKILL; restart in")
        assert watcher.notes[-1] == "decode-0 is back"
        with pytest.raises(KeyError):
            cluster.kill("nobody")


async def test_local_cluster_killed_router_restarts(journal):
    async with make(journal) as cluster:
        before = cluster.processes[-1].pid
        cluster.kill("router")
        await cluster.wait_ready("router", after_pid=before)


async def test_local_cluster_failed_start_reports_reason_and_cleans_up(journal):
    with pytest.raises(ClusterFailed, match="decode-0 exited with code 3 before it was ready") as failed:
        async with make(journal, {"decode-0": "fail"}):
            pytest.fail("entered")
    assert "error: the model directory is empty" in str(failed.value)
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_malformed_ready_line_fails_start(journal):
    with pytest.raises(ClusterFailed, match="the ready line is not a JSON object"):
        async with make(journal, {"prefill-0": "garbage"}):
            pytest.fail("entered")


async def test_local_cluster_hanging_start_is_killed(journal):
    policy = RestartPolicy(start_timeout_s=0.5, stop_early_s=0.5)
    with pytest.raises(ClusterFailed, match="was ended by SIGKILL before it was ready"):
        async with make(journal, {"prefill-0": "slow"}, policy=policy):
            pytest.fail("entered")
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_missing_command_fails_start():
    cluster = LocalCluster(fake_config(), command=lambda *_: ["/nonexistent/program"], policy=POLICY)
    with pytest.raises(ClusterFailed, match="exited with code 1"):
        await cluster.__aenter__()


async def test_local_cluster_without_decode_workers_ends(journal):
    async with make(journal, {"decode-0": "once"}) as cluster:
        cluster.kill("decode-0")
        with pytest.raises(ClusterFailed, match="no decode is left") as failed:
            await cluster.wait_stopped()
        assert "the model directory is empty" in str(failed.value)
        with pytest.raises(ClusterFailed):
            await cluster.wait_ready("decode-0")
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_stop_during_start_cleans_up(journal):
    watcher = Recorder()
    cluster = make(journal, {"decode-0": "slow"}, watcher=watcher)
    task = asyncio.ensure_future(cluster.__aenter__())
    await watcher.heard.wait()
    cluster.request_stop()
    with pytest.raises(StoppedEarly):
        await task
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_cancelled_start_cleans_up(journal):
    watcher = Recorder()
    cluster = make(journal, {"decode-0": "slow"}, watcher=watcher)
    task = asyncio.ensure_future(cluster.__aenter__())
    await watcher.heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_kill_ends_stubborn_process(journal):
    async with make(journal, {"router": "stubborn"}) as cluster:
        cluster.request_stop()
        cluster.request_kill()
        await cluster.wait_stopped()
    assert all(gone(pid) for pid in pids(journal))


async def test_local_cluster_children_have_own_session_and_clean_environment(journal, monkeypatch):
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    async with make(journal) as cluster:
        for view in cluster.processes:
            assert os.getsid(view.pid) == view.pid
            assert b"TANDEM_" not in environment(view.pid)


def environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


async def start_up(journal, *modes, before=(), **streams):
    """A `tandem up` of fake processes in its own process."""
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(
        *before,
        sys.executable,
        "-m",
        "tests.support.cluster.fake_cluster",
        str(journal),
        *modes,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(journal.parent)},
        **(pipes | streams),
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_up_drains_on_the_first_signal(journal, signum):
    process = await start_up(journal)
    assert await process.stdout.readline() == b"serving\n"
    process.send_signal(signum)
    _, err = await process.communicate()
    assert process.returncode == 0, err
    assert b"draining; a second Ctrl-C kills" in err
    phases = [b"decode-0 starting; ", b"router opening its ports", b"router ready, pid"]
    assert sorted(phases, key=err.index) == phases
    assert events(journal)[-3] == "router term"
    assert all(gone(pid) for pid in pids(journal))


async def test_up_kills_on_the_second_signal(journal):
    process = await start_up(journal, "router=stubborn")
    await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    while b"draining" not in await process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130, err
    assert all(gone(pid) for pid in pids(journal))


async def test_up_drains_when_its_terminal_closes(journal):
    leader, follower = pty.openpty()
    process = await start_up(journal, before=("setsid", "--ctty"), stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    async with asyncio.timeout(60.0):
        shown, loop = b"", asyncio.get_running_loop()
        while b"serving\r\n" not in shown:
            shown += await loop.run_in_executor(None, os.read, leader, 1 << 12)
        os.close(leader)
        assert await process.wait() == 0
    assert events(journal)[-3] == "router term"
    assert all(gone(pid) for pid in pids(journal))


@pytest.mark.parametrize(("mode", "level"), [("ok", "debug"), ("spoilt", "info")])
async def test_up_without_terminal_reloads_on_sighup(journal, mode, level):
    """All processes get the edited file, unless it is invalid."""
    process = await start_up(journal, f"anybody={mode}", before=("setsid",))
    assert await process.stdout.readline() == b"serving\n"
    process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(60.0):
        reloaded, shown = set(), b""
        while len(reloaded) < 3:
            line = await process.stderr.readline()
            assert line, reloaded
            shown += line
            if b"reads again" in line:
                reloaded.add(line)
    assert all(f"['{level}']".encode() in line for line in reloaded)
    assert (b"log_level: must be a level; the configuration is unchanged" in shown) is (mode == "spoilt")
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0
    seen = events(journal)
    assert sorted(seen[3:6]) == ["decode-0 hup", "prefill-0 hup", "router hup"]
    assert seen[6] == "router term"
    assert all(gone(pid) for pid in pids(journal))


async def test_up_hanging_reload_does_not_block_cluster(journal, monkeypatch):
    monkeypatch.setattr("tandem.process.hangup.has_terminal", lambda: False)
    hangs, goes_on = threading.Event(), threading.Event()

    def again():
        hangs.set()
        assert goes_on.wait(60.0)
        return fake_config().model_copy(update={"log_level": "debug"})

    async def body(cluster):
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            assert await asyncio.to_thread(hangs.wait, 60.0)
            before = cluster.processes[-1].pid
            cluster.kill("router")
            await cluster.wait_ready("router", after_pid=before)
        finally:
            goes_on.set()
        while "router hup" not in events(journal):  # noqa: ASYNC110 - a file is no event
            await asyncio.sleep(0.01)
        assert cluster.config.log_level == "debug"
        return 0

    async with asyncio.timeout(60.0):
        quiet, command = Console(file=io.StringIO()), fake_command(journal)
        assert await run_with(fake_config(), body, console=quiet, show_logs=False, command=command, again=again) == 0


async def test_up_shows_why_a_start_failed(journal):
    process = await start_up(journal, "decode-0=fail")
    out, err = await process.communicate()
    assert process.returncode == 1
    assert b"decode-0 exited with code 3 before it was ready" in err
    assert b"error: the model directory is empty" in err
    assert b"Traceback" not in out + err


async def test_children_die_with_killed_supervisor(journal):
    process = await start_up(journal)
    await process.stdout.readline()
    handles = [os.pidfd_open(pid) for pid in pids(journal)]
    process.kill()
    loop = asyncio.get_running_loop()
    for handle in handles:  # readable once its process has ended; no time is asserted
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        await ended.wait()
        loop.remove_reader(handle)
        os.close(handle)
    await process.communicate()
    assert len(handles) == 3
