"""The hub's own client against a hub with broken connections: `fetch-model` gets the whole model."""

import asyncio
import hashlib
import http.server
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.http_server import answering

pytestmark = pytest.mark.slow
COMMIT = "a" * 40
WEIGHTS = hashlib.shake_128(b"weights").digest(25_000_000)
FILES = {"config.json": b"{}\n", "tokenizer.json": b"{}\n", "model.safetensors": WEIGHTS}
HAS_COME = 21_000_000
CLIENTS_OWN_TRIES = 6
"""Of one read in which nothing comes."""


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's HTTP as far as its client uses it; one file's connection breaks, and then sends nothing."""

    protocol_version = "HTTP/1.1"
    begins: list[int]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        sizes = [(name, len(data)) for name, data in FILES.items()]
        if path.startswith("/api/models/org/m/tree/"):
            self.send([{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes])
        elif path.startswith("/api/models/org/m"):
            files = [{"rfilename": name, "size": size} for name, size in sizes]
            self.send({"id": "org/m", "sha": COMMIT, "siblings": files})
        elif path.startswith(f"/org/m/resolve/{COMMIT}/"):
            self.give(path.rpartition("/")[2])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def send(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def give(self, name: str) -> None:
        data, wanted = FILES[name], re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(data)
        if name == "model.safetensors":
            self.begins.append(begin)
            # The first brings most of it; the client's own tries and one more bring nothing.
            if len(self.begins) <= CLIENTS_OWN_TRIES + 2:
                end = max(begin, HAS_COME if len(self.begins) == 1 else 0)
        self.wfile.write(data[begin:end])
        self.close_connection = end < len(data)

    def log_message(self, *_: object) -> None:
        """Write no access log to standard error."""


async def test_interrupted_download_resumes_and_then_restarts(tmp_path: Path) -> None:
    Hub.begins = []
    into = tmp_path / "m"
    with answering(Hub) as url:
        own = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        command = (sys.executable, "-m", "cluster.hub", "org/m", "--into", str(into))
        fetching = await asyncio.create_subprocess_exec(
            *command, env=os.environ | own, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, troubles = await fetching.communicate()
    assert fetching.returncode == 0, troubles.decode()
    assert b"; retrying in " in output, "the client's own tries did not suffice"
    assert {name: (into / name).read_bytes() for name in FILES} == FILES
    assert len(Hub.begins) == CLIENTS_OWN_TRIES + 3
    own_tries, later = Hub.begins[1:CLIENTS_OWN_TRIES], Hub.begins[CLIENTS_OWN_TRIES:]
    assert min(own_tries) > 0, "the client goes on where it broke"
    assert set(later) == {0}, "then it has forgotten what came: this version of it keeps whole files alone"
