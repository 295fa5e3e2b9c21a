"""A model without a chat template: every first step that `tandem up` suggests works, on real processes."""

import asyncio
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from cluster.cli import banner
from tandem.model_path import BUILTIN, model_directory
from tests.support.running_cluster import running


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """The built-in model without its chat template."""
    directory = tmp_path / "base"
    shutil.copytree(model_directory(BUILTIN), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config.pop("chat_template")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


async def test_base_model_every_first_step_completes_text(fork_servers, base_model):
    workers = {"prefill__replicas": 0, "decode__replicas": 1}
    async with running(command=fork_servers.command, model__path=str(base_model), **workers) as cluster:
        processes = cluster.local.processes
        assert not banner.has_chat_template(processes)
        _, _, url, *_, body = shlex.split(banner.curl_line(cluster.local.config, "base", chats=False))
        answer = await cluster.http.post(url, json=json.loads(body) | {"stream": False})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].strip()
        snapshot = (await cluster.http.get("/status/snapshot")).json()
        assert snapshot["model"]["has_chat_template"] is False
        command = [sys.executable, "-m", "cluster.cli.main", "chat", "--url", cluster.local.http_url]
        pipe = asyncio.subprocess.PIPE
        chat = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await chat.communicate(b"Once upon a time there was a little fox\n")
        assert chat.returncode == 0, err
        assert out.strip()
        assert b"it completes each text" in err
