"""The part of a Kubernetes API server that a planner speaks to, on a real socket with TLS.

As the real one: bearer tokens, merge patches of `scale`, a version that every change of the set moves, 409 for a patch
on top of another version, and only the sets and verbs that the account's Role names.
"""

import http.server
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority
from tests.support.http_server import answering

NAMESPACE = "llm"


@dataclass
class ApiServer:
    """Two StatefulSets, and who may scale them."""

    account: Path
    url: str = ""
    token: str = "first"
    replicas: dict[str, int] = field(default_factory=lambda: {"chat-prefill": 1, "chat-decode": 2})
    versions: dict[str, int] = field(default_factory=lambda: {"chat-prefill": 7, "chat-decode": 7})
    allowed: set[str] = field(default_factory=lambda: {"GET", "PATCH"})
    requests: list[tuple[str, str]] = field(default_factory=list)
    moves_after_get: str | None = None
    """A set that changes as soon as it was looked at, without being scaled."""
    answer: bytes | None = None
    """In place of a Scale."""

    def answer_to(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests.append((method, path))
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, _status("Unauthorized")
        kind, _, tail = path.partition(f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/")
        name, _, sub = tail.partition("/")
        if kind or sub != "scale" or name not in self.replicas or method not in self.allowed:
            return 403, _status(f'statefulsets.apps "{name}" is forbidden')
        if method == "PATCH":
            if headers.get("Content-Type") != "application/merge-patch+json":
                return 415, _status("the body is of no type that is known")
            patch = json.loads(body)
            if patch["metadata"]["resourceVersion"] != str(self.versions[name]):
                return 409, _status("the object has been modified; please apply your changes to the latest version")
            self.replicas[name] = patch["spec"]["replicas"]
            self.versions[name] += 1
        scale = self._scale(name)
        if method == "GET" and self.moves_after_get == name:
            self.versions[name] += 1
        return 200, scale

    def _scale(self, name: str) -> dict[str, Any]:
        # As the real one: no number at all where it is 0.
        spec = {"replicas": self.replicas[name]} if self.replicas[name] else {}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": str(self.versions[name])},
            "spec": spec,
            "status": {"replicas": self.replicas[name]},
        }


def _status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Listens while the block runs; `folder` becomes a service account's."""
    files = Authority().issue(folder, name="127.0.0.1")
    state = ApiServer(account=folder)
    (folder / "ca.crt").write_bytes(files.ca.read_bytes())
    (folder / "token").write_text(f"{state.token}\n")
    (folder / "namespace").write_text(NAMESPACE)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            code, answer = state.answer_to(self.command, self.path, self.headers, body)
            content = state.answer or json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PATCH = do_GET

        def log_message(self, *_: object) -> None:
            """Write no access log to standard error."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with answering(Handler, context) as state.url:
        yield state
