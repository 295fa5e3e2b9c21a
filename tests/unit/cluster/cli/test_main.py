"""The command line, mostly as a user runs it: a process with an exit code."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.doctor import checks as doctor_checks
from cluster.doctor.findings import Finding, Status, has_failed
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.config.engine import ModelSection

ROOT = Path(__file__).resolve().parents[4]


def tandem(*arguments, **environment):
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    env = {**os.environ, "COLUMNS": "100", **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=60, check=False)


def test_cli_help_groups_commands():
    done = tandem("--help")
    assert done.returncode == 0
    for expected in (
        "Run a cluster here",
        "Run one process",
        "Use a cluster",
        "Inspect and measure",
        "--install-completion",
    ):
        assert expected in done.stdout
    shown = tandem("up", "--help").stdout
    for option in (
        "--model",
        "--dtype",
        "--host",
        "--port",
        "--grpc-port",
        "--prefill",
        "--decode",
        "--redis",
        "--ray",
        "--config",
    ):
        assert option in shown


def test_version_names_tandem_and_torch():
    done = tandem("version")
    assert done.stdout.startswith("tandem ")
    assert "torch " in done.stdout


def test_light_commands_never_load_torch():
    code = (
        "import sys, cluster.cli.main, cluster.cli.chat, cluster.router_client, cluster.distribution, cluster.cli.up\n"
        "import cluster.cli.demo\n"
        "cluster.distribution.version_line()\n"
        "print(sorted({'torch', 'grpc', 'fastapi', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--dtype", "int3"), "error: model.dtype: "),
        (("up", "--decode", "0"), "decode.replicas must be at least 1"),
        (("up", "--model", "/nonexistent"), "error: model.path: /nonexistent is neither"),
        (("demo", "--config", "/nonexistent.yaml"), "error: /nonexistent.yaml: "),
        (("up", "--port", "70000"), "error: router.port: "),
        (("up", "--redis", "localhost:6379"), "error: redis.url is not redis[s]://"),
    ],
)
def test_cli_invalid_setting_is_one_line_with_exit_code_2(arguments, message):
    done = tandem(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("url", "is_warned"), [("redis://:hush@h:6379", True), ("redis://h:6379", False)])
def test_cli_password_argument_is_warned_of(url, is_warned, monkeypatch):
    async def serve(*_, **__):
        return 0

    monkeypatch.setattr("cluster.cli.up.serve", serve)
    done = CliRunner().invoke(app, ["up", "--redis", url])
    assert done.exit_code == 0, done.output
    assert ("the password in --redis is visible" in done.stderr) is is_warned
    assert "hush" not in done.stderr


def test_up_taken_port_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = tandem("up", "--port", port, "--grpc-port", "0")
    assert done.returncode == 2
    assert f"router.port: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["router", "--config", "{config}"], ["router", "--config", "{config}"]),
        (["prefill", "-c", "{config}"], ["prefill_worker", "--config", "{config}", "--index", "0"]),
        (["decode", "-c", "{config}", "-i", "2"], ["decode_worker", "--config", "{config}", "--index", "2"]),
        (["bench", "serve", "--rate", "3", "--help"], ["tandem_bench", "serve", "--rate", "3", "--help"]),
        (["eval", "builtin", "--suite", "kl", "-h"], ["tandem_bench.quality", "builtin", "--suite", "kl", "-h"]),
    ],
)
def test_cli_process_commands_exec_their_module(arguments, module, tmp_path, monkeypatch):
    config = tmp_path / "cluster.yaml"
    config.write_text("log_level: info\n")
    calls = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: calls.append((path, command, env["PYTHONPATH"])))
    filled = [word.format(config=config) for word in arguments]
    assert CliRunner().invoke(app, filled).exit_code == 0
    path, command, pythonpath = calls[0]
    assert path == sys.executable
    assert command == [sys.executable, "-m", *(word.format(config=config) for word in module)]
    assert pythonpath.split(os.pathsep)[0] == str(ROOT)


def test_doctor_reports_this_machine_as_json():
    done = tandem("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) >= {"Python", "packages", "torch", "CUDA", "NCCL", "Triton", "Redis", "C++ compiler", "memfd"}
    assert set(checks) >= {"/dev/shm", "open files", "locked memory", "memory", "disk here", "HTTP port", "gRPC port"}
    assert checks["Python"]["status"] == checks["packages"]["status"] == checks["torch"]["status"] == "ok"


def test_doctor_reports_taken_ports_and_missing_model_files(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router = RouterConfig(port=taken.getsockname()[1], grpc_port=0)
        config = ClusterConfig(router=router, model=ModelSection(path=str(tmp_path)))
        findings = {finding.name: finding for finding in doctor_checks.examine(config)}
    assert findings["HTTP port"].status is Status.WARN
    assert "--port" in findings["HTTP port"].hint
    assert findings["gRPC port"].status is Status.OK
    assert findings["model"].status is Status.FAIL
    assert "config.json, tokenizer.json, weights" in findings["model"].detail
    assert has_failed(list(findings.values()))


def test_doctor_router_only_skips_worker_checks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    config = ClusterConfig(model=ModelSection(path=str(tmp_path)))
    of_all = {finding.name: finding for finding in doctor_checks.examine(config)}
    of_routers = {finding.name: finding for finding in doctor_checks.examine(config, router_only=True)}
    assert of_all["model"].status is Status.FAIL  # no weights
    assert of_routers["model"].status is Status.OK
    assert not {"torch", "CUDA", "Triton"} & set(of_routers)
    assert set(of_routers) >= {"Python", "packages", "C++ compiler", "HTTP port", "open files"}


def test_doctor_exit_code_follows_failed_checks(monkeypatch):
    for status, code in ((Status.FAIL, 1), (Status.WARN, 0)):
        finding = Finding(name="thing", status=status, detail="broken", hint="mend it")
        monkeypatch.setattr(doctor_checks, "examine", lambda _config, finding=finding, **_: [finding])
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == code
        assert "mend it" in result.stdout
