"""`tandem profile` against a fake router."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.main import app
from tests.support.http_server import answering


@dataclass
class FakeRouter:
    """Answers every request alike, and records it."""

    url: str = ""
    answer: tuple[int, bytes, dict[str, str]] = (200, b"a flame", {})
    requested_paths: list[str] = field(default_factory=list)


@pytest.fixture
def fake_router() -> Iterator[FakeRouter]:
    made = FakeRouter()

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.requested_paths.append(self.path)
            status, content, headers = made.answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Write no access log to standard error."""

    with answering(Answering) as made.url:
        yield made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


def test_profile_writes_router_and_worker_recordings(fake_router: FakeRouter, tmp_path: Path) -> None:
    flame = run("--router", "--out", str(tmp_path / "f.svg"), "--url", f"{fake_router.url}/v1")
    assert (flame.exit_code, (tmp_path / "f.svg").read_bytes()) == (0, b"a flame")
    fake_router.answer = (200, gzip.compress(b"{}"), {"X-Tandem-Steps": "7"})
    trace = run("--worker", "decode-0", "--steps", "7", "--out", str(tmp_path / "t.json"), "--url", fake_router.url)
    assert trace.output.endswith("t.json: 7 steps\n")
    assert (tmp_path / "t.json").read_bytes() == b"{}"
    assert fake_router.requested_paths == [
        "/debug/profile/router?seconds=10.0&format=svg",
        "/debug/profile/worker?seconds=10.0&worker=decode-0&steps=7",
    ]


def test_profile_unwritable_output_records_nothing(fake_router: FakeRouter, tmp_path: Path) -> None:
    lost = run("--router", "--out", str(tmp_path / "nowhere" / "f.svg"), "--url", fake_router.url)
    assert lost.exit_code == 2
    assert "no such directory" in lost.output
    assert fake_router.requested_paths == []
    (tmp_path / "f.svg").mkdir()
    in_the_way = run("--router", "--out", str(tmp_path / "f.svg"), "--url", fake_router.url)
    assert (in_the_way.exit_code, in_the_way.output.partition(":")[0]) == (1, "error")


def test_profile_refusal_or_no_cluster_is_one_line(fake_router: FakeRouter, tmp_path: Path) -> None:
    where = ("--router", "--out", str(tmp_path / "f.svg"), "--url")
    fake_router.answer = (401, b'{"error": {"message": "no"}}', {})
    refused = run(*where, fake_router.url)
    assert (refused.exit_code, refused.output) == (
        1,
        "error: 401: no (give the file of an API key with --api-key-file)\n",
    )
    nobody = run(*where, "http://127.0.0.1:9")
    assert nobody.output.startswith("error: no cluster answers at http://127.0.0.1:9: start one with")
