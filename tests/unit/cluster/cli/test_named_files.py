"""Files named by a command's options: a FIFO is refused and never waited for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.autoscaler.routers import RouterGroup
from cluster.cli.main import _key_of
from cluster.kv_arithmetic import read_model
from cluster.router_client import ClientError, client_tls
from cluster.simulator.inputs.latency_files import load_latency
from cluster.simulator.inputs.trace_files import load_trace
from engine.model.files import ModelDirectory
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError
from tandem_bench.report import read_json


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("trace.jsonl", load_trace),
        ("trace.csv", load_trace),
        ("latency.json", lambda path: load_latency(str(path))),
        ("latency.csv", lambda path: load_latency(f"{path}#model/hardware/1")),
        ("latency.json", lambda path: load_latency(f"{path}#model/1")),
        ("model.json", lambda path: read_model(str(path))),
        ("rows.json", read_json),
        ("config.json", lambda path: ModelDirectory(path.parent).read_json(path.name)),
        ("tokenizer.json", lambda path: Tokenizer.load(path.parent)),
        ("ca.pem", lambda path: client_tls(path, None)),
        ("cert.pem", lambda path: client_tls(None, path)),
        ("key", lambda path: RouterGroup(["http://127.0.0.1:1"], api_key_file=path, tls=None)._key()),
    ],
)
def test_cli_fifo_is_refused_by_name(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((ConfigError, ClientError), match=rf"{name}.*not a regular file"):
        read(tmp_path / name)


def test_cli_fifo_as_key_file_ends_command_with_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "key")
    with pytest.raises(typer.Exit):
        _key_of(tmp_path / "key")
    assert "key: a FIFO, not a regular file" in capsys.readouterr().err
