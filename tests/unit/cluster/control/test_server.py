"""Commands over the control socket of a cluster of tiny processes."""

import asyncio
import json
import os
import socket
import stat
from functools import partial

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.fleet import NoCluster, send_request
from cluster.cli.main import app
from cluster.cli.up import serve, serve_routers
from cluster.control.server import MAX_LINE_BYTES, ControlSocket
from cluster.control.wire import (
    FlipRequest,
    MalformedRequest,
    RestartRequest,
    ScaleRequest,
    StatusRequest,
    encode_message,
    parse_request,
)
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.supervisor import ProcessState, RestartPolicy
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.process.runtime_folder import runtime_folder
from tests.support.cluster.fake_cluster import fake_command, fake_config


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    return made


def make(folder, modes=None, **counts):
    config = fake_config(**counts).model_copy(update={"control_socket": str(folder / "c.sock")})
    policy = RestartPolicy(stop_early_s=0.5, start_timeout_s=30)
    return LocalCluster(config, command=fake_command(folder / "journal", modes), policy=policy)


async def run(*arguments):
    """Run a command beside the event loop that answers it."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def test_fleet_commands_change_cluster_and_report_progress(folder):
    reports = []
    async with make(folder) as cluster, ControlSocket(cluster, report=reports.append) as control:
        assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
        where = ("--socket", str(control.path))
        done = await run("scale", "decode=2", "prefill=2", *where)
        assert (done.exit_code, done.output.splitlines()[-1]) == (0, "done"), done.output
        assert "decode-1 serves" in done.output
        done = await run("flip", "prefill", *where)
        assert done.exit_code == 0, done.output
        assert sorted(view.name for view in cluster.workers) == ["decode-0", "prefill-0", "prefill-1", "prefill-2"]
        done = await run("flip", "prefill", *where)
        assert (done.exit_code, done.output) == (1, "not done: no decode worker can be spared\n")
        done = await run("restart", "router", "prefill-1", *where)
        assert done.exit_code == 0, done.output
        assert sorted(view.name for view in cluster.workers) == ["decode-0", "prefill-0", "prefill-2", "prefill-3"]
        done = await run("restart", "decode-7", *where)
        assert (done.exit_code, done.output.partition(";")[0]) == (1, "not done: unknown process decode-7")
        (status, end) = await asyncio.to_thread(lambda: list(send_request(control.path, StatusRequest())))
        assert {one.name: one.role for one in status.processes}["router-1"] == "router"
        assert {one.state for one in status.processes} == {"ready"}
        listed = (await run("ps", *where)).output.splitlines()
        assert sorted(line.split()[0] for line in listed) == sorted(view.name for view in cluster.processes)
        pids = {view.name: str(view.pid) for view in cluster.processes}
        assert all(line.split()[1:4] == ["ready", "pid", pids[line.split()[0]]] for line in listed)
        assert (status.changing, end.done) == (False, True)
    assert reports[-1].startswith("not done: unknown process decode-7; the processes are: decode-0, prefill-0, ")
    assert not control.path.exists()
    gone = (await run("restart", *where)).output
    assert gone.startswith(f"not done: no cluster answers at {control.path} (")
    assert gone.endswith("or give its HTTP port with --port\n")


@pytest.mark.parametrize(
    "arguments",
    [("scale", "decode"), ("scale", "router=2"), ("scale", "decode=0"), ("scale", "decode=1", "decode=2"),
     ("flip", "router"), ("restart", "nobody"), ("restart", "decode-"), ("restart", "decode-0", "x-1"),
     ("scale", "prefill=-1")],
)  # fmt: skip
async def test_fleet_commands_invalid_arguments_are_refused(arguments):
    assert (await run(*arguments)).exit_code == 2


NONSENSE = [
    b"",
    b"x",
    b"[]",
    b'{"op":"melt"}',
    b'{"op":"scale","decode":2,"gpu":1}',
    b'{"op":"scale","decode":true}',
    b'{"op":"scale","prefill":"2"}',
    b'{"op":"scale","decode":2.0}',
    b'{"op":"flip"}',
    b"{" * 9,
    b'{"op":"restart","roles":' + b"[" * 9000,
    b'{"op":"status","pad":"' + b"x" * MAX_LINE_BYTES,
]


async def test_control_socket_malformed_request_gets_reason(folder):
    async with make(folder) as cluster, ControlSocket(cluster, report=[].append) as control:
        for line in NONSENSE:
            with pytest.raises(MalformedRequest):
                parse_request(line)
            reader, writer = await asyncio.open_unix_connection(control.path)
            writer.write(line + b"\n")
            answer = json.loads(await reader.read())
            assert answer["done"] is False, line[:40]
            assert answer["reason"]
            writer.close()
        assert [view.state for view in cluster.workers] == [ProcessState.READY] * 2


async def test_control_socket_connection_without_request_is_not_reported(folder):
    reports: list[str] = []
    async with make(folder) as cluster, ControlSocket(cluster, report=reports.append) as control:
        reader, writer = await asyncio.open_unix_connection(control.path)
        writer.close()
        assert await reader.read() == b""
    assert reports == []


def test_control_requests_omit_defaults_for_older_parent():
    assert encode_message(RestartRequest()) == b'{"op":"restart","roles":[]}\n'
    assert encode_message(RestartRequest(names=("decode-0",))) == b'{"op":"restart","roles":[],"names":["decode-0"]}\n'
    assert encode_message(ScaleRequest(decode=2)) == b'{"op":"scale","decode":2}\n'
    assert encode_message(FlipRequest(to="decode")) == b'{"op":"flip","to":"decode"}\n'


async def test_control_socket_allows_one_change_which_outlives_its_client(folder):
    os.mkfifo(folder / "decode-1")
    async with make(folder, {"decode-1": "held"}) as cluster, ControlSocket(cluster, report=[].append) as control:
        reader, writer = await asyncio.open_unix_connection(control.path)
        writer.write(encode_message(ScaleRequest(decode=2)))
        assert b"starting a decode" in await reader.readline()
        (answer,) = await asyncio.to_thread(lambda: list(send_request(control.path, FlipRequest(to="decode"))))
        assert answer.reason == "another change is in progress: `tandem abort` aborts it"
        writer.close()
        await asyncio.to_thread((folder / "decode-1").write_bytes, b"go")
        await cluster.wait_ready("decode-1")
        assert len(cluster.workers) == 3


async def hanging(control, request):
    """Request a change that waits for a process that never serves; returns the rest of the answer once that starts."""
    reader, writer = await asyncio.open_unix_connection(control.path)
    writer.write(encode_message(request))
    while b"starting a " not in await reader.readline():
        pass

    async def rest():
        lines = (await reader.read()).splitlines()
        writer.close()
        return json.loads(lines[-1])

    return asyncio.create_task(rest())


async def test_abort_ends_hanging_change_and_keeps_finished_steps(folder):
    async with make(folder, {"decode-2": "slow"}) as cluster, ControlSocket(cluster, report=[].append) as control:
        where = ("--socket", str(control.path))
        idle = await run("abort", *where)
        assert (idle.exit_code, idle.output) == (1, "not done: no change is in progress\n")
        result = await run("scale", "decode=2", *where)
        assert result.exit_code == 0, result.output
        waits = await hanging(control, ScaleRequest(decode=4))
        done = await run("abort", *where)
        assert (done.exit_code, done.output) == (0, "done\n")
        assert (await waits)["reason"] == "it was aborted"
        assert load(cluster.config_path).decode.replicas == 2
        result = await run("restart", "prefill", *where)  # while the one that was given up ends
        assert result.exit_code == 0, result.output
        assert sorted(view.name for view in cluster.workers if view.state is ProcessState.READY) == [
            "decode-0", "decode-1", "prefill-1",
        ]  # fmt: skip


async def test_operator_change_preempts_planner_but_not_vice_versa(folder):
    # No name is used twice: decode-1 is replaced, and decode-2 restarts.
    slow = {"decode-1": "slow", "decode-2": "slow"}
    async with make(folder, slow) as cluster, ControlSocket(cluster, report=[].append) as control:
        waits = await hanging(control, ScaleRequest(decode=2, yields=True))
        (answer,) = await asyncio.to_thread(
            lambda: list(send_request(control.path, FlipRequest(to="decode", yields=True)))
        )
        assert answer.reason.startswith("another change is in progress")
        answer = await asyncio.to_thread(lambda: list(send_request(control.path, ScaleRequest(prefill=2))))
        assert answer[-1].done is True
        assert (await waits)["reason"] == "replaced by an operator's change"
        assert [load(cluster.config_path).prefill.replicas, load(cluster.config_path).decode.replicas] == [2, 1]
        waits = await hanging(control, RestartRequest(roles=("decode",)))
        (answer,) = await asyncio.to_thread(lambda: list(send_request(control.path, ScaleRequest(prefill=1))))
        assert answer.reason.startswith("another change is in progress")
        assert (await run("abort", "--socket", str(control.path))).exit_code == 0
        await waits


async def test_flip_of_last_prefill_worker_requires_yes(folder):
    async with make(folder, prefill=2) as cluster, ControlSocket(cluster, report=[].append) as control:
        where = ("--socket", str(control.path))
        done = await run("flip", "decode", *where)
        assert done.exit_code == 0, done.output
        [last] = [view.name for view in cluster.workers if view.name.startswith("prefill")]
        refused = await run("flip", "decode", *where)
        assert refused.exit_code == 1
        assert refused.output.startswith(f"warning: {last} is the last prefill worker")
        assert "--yes" in refused.output
        assert last in [view.name for view in cluster.workers]
        done = await run("flip", "decode", "--yes", *where)
        assert done.exit_code == 0, done.output
        assert [view.name for view in cluster.workers] == ["decode-0", "decode-1", "decode-2"]
        refused = await run("flip", "decode", *where)
        assert (refused.exit_code, refused.output) == (1, "not done: no prefill worker can be spared\n")


async def test_control_socket_invalid_request_keeps_the_planners_change(folder):
    counts = {"prefill": 0, "modes": {"decode-1": "slow"}}
    async with make(folder, **counts) as cluster, ControlSocket(cluster, report=[].append) as control:
        waits = await hanging(control, ScaleRequest(decode=2, yields=True))
        (answer,) = await asyncio.to_thread(lambda: list(send_request(control.path, FlipRequest(to="decode"))))
        assert answer.reason == "no prefill worker can be spared"
        assert cluster.under_way is not None
        assert (await run("abort", "--socket", str(control.path))).exit_code == 0
        await waits


async def test_interrupted_command_names_the_command_that_aborts(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cluster.cli.fleet.send_request", interrupted)
    result = await run("restart")
    hint = "Interrupting the command does not cancel the change; `tandem abort` does.\n"
    assert (result.exit_code, result.output) == (130, hint)


async def test_change_unwritable_configuration_reports_failure_and_ends(folder):
    async with make(folder) as cluster, ControlSocket(cluster, report=[].append) as control:
        place = cluster.config_path.parent
        kept = place.rename(folder / "moved")
        place.write_text("in the way")
        (answer,) = await asyncio.to_thread(lambda: list(send_request(control.path, ScaleRequest(decode=2))))
        assert answer.done is False
        assert "cannot write the configuration" in answer.reason
        place.unlink()
        kept.rename(place)
        assert len(cluster.workers) == 2
        answer = await asyncio.to_thread(lambda: list(send_request(control.path, ScaleRequest(decode=2))))
        assert answer[-1].done is True


async def test_control_socket_in_accessible_folder_is_refused(folder, monkeypatch):
    folder.chmod(0o755)
    async with make(folder) as cluster:
        with pytest.raises(ConfigError, match="is accessible to other users"):
            await ControlSocket(cluster, report=[].append).__aenter__()
        folder.chmod(0o700)
        (folder / "c.sock").write_text("mine")
        with pytest.raises(ConfigError, match="exists and is not a socket"):
            await ControlSocket(cluster, report=[].append).__aenter__()
        assert (folder / "c.sock").read_text() == "mine"
    reports = []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "tandem").mkdir(mode=0o755)
    async with ControlSocket(LocalCluster(fake_config()), report=reports.append):
        assert reports[0].startswith("this cluster cannot be changed while it runs: control_socket: ")


async def test_control_socket_start_removes_dead_sockets(folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "tandem").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "tandem" / "8999.sock"))
    os.utime(folder / "tandem" / "8999.sock", (0, 0))
    async with ControlSocket(LocalCluster(fake_config()), report=[].append) as control:
        assert list((folder / "tandem").iterdir()) == [control.path]


async def test_control_socket_of_other_cluster_is_left_alone(folder, monkeypatch):
    """Clusters with one port on two addresses would have the same socket name."""
    cluster, other = make(folder), make(folder)
    async with ControlSocket(cluster, report=[].append) as control:
        with pytest.raises(ConfigError, match="another cluster answers at"):
            await ControlSocket(other, report=[].append).__aenter__()
        (status, _) = await asyncio.to_thread(lambda: list(send_request(control.path, StatusRequest())))
        assert status.changing is False
        control.path.unlink()
        control.path.write_text("somebody else's by now")
    assert control.path.exists()


async def test_start_checks_control_socket_folder_first(folder, monkeypatch):
    folder.chmod(0o755)
    never = object()  # a launcher that would be asked for everything
    for start in (
        partial(serve, out=Console(), err=Console(), launcher=never),
        partial(serve_routers, console=Console()),
    ):
        with pytest.raises(ConfigError, match=r"control_socket: .* is accessible to other users"):
            await start(fake_config().model_copy(update={"control_socket": str(folder / "c.sock")}))


def test_control_client_without_cluster_reports_it(folder, monkeypatch):
    with pytest.raises(NoCluster, match="no cluster answers"):
        list(send_request(folder / "none.sock", StatusRequest()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert runtime_folder() == folder / "tandem"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_folder().name == f"tandem-{os.getuid()}"
