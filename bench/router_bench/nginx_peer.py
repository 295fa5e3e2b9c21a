"""nginx as a proxy before an upstream that does nothing: what any proxy written in C costs here."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.errors import CannotMeasure
from bench.router_bench import doors

_START_S = 20.0
_CONFIG = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream worker {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCosts:
    """Of one round."""

    request_ms: float
    stream_events_per_cpu_s: float


def measure_nginx(*, num_requests: int = 3000) -> PeerCosts:
    """One round. Raises CannotMeasure where nginx is not installed."""
    with _proxy() as (url, worker):
        body = doors.chat_body(max_tokens=doors.ANSWER_TOKENS, stream=False)
        doors.run_client(url, body, connections=doors.NUM_CLIENTS, requests=num_requests // 4)
        before_s = doors.cpu_s(worker)
        plain = doors.run_client(url, body, connections=doors.NUM_CLIENTS, requests=num_requests)
        request_s = (doors.cpu_s(worker) - before_s) / plain["requests"]
        body = doors.chat_body(max_tokens=doors.STREAM_TOKENS, stream=True)
        before_s = doors.cpu_s(worker)
        streamed = doors.run_client(url, body, connections=doors.NUM_STREAMS, requests=2 * doors.NUM_STREAMS)
        stream_s = doors.cpu_s(worker) - before_s
    if plain["bad"] or streamed["bad"] or streamed["events"] < streamed["requests"] * doors.STREAM_TOKENS:
        raise CannotMeasure(f"nginx did not answer everything: {plain}, {streamed}")
    return PeerCosts(request_ms=1e3 * request_s, stream_events_per_cpu_s=streamed["events"] / stream_s)


@contextmanager
def _proxy() -> Iterator[tuple[str, psutil.Process]]:
    """Its URL and its worker process."""
    nginx = shutil.which("nginx")
    if nginx is None:
        raise CannotMeasure("nginx is not installed (Debian: apt-get install nginx-light)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-nginx-")))
        upstream, port = doors.free_ports(2)
        doors.start(stack, [sys.executable, "-m", "bench.router_bench.upstream", "--port", str(upstream)])
        file = folder / "nginx.conf"
        file.write_text(_CONFIG.format(folder=folder, upstream=upstream, port=port))
        process = doors.start(stack, [nginx, "-c", str(file), "-e", str(folder / "errors")], stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, folder / "errors")
        (worker,) = psutil.Process(process.pid).children()
        # Its master is killed: it would not outlive the pipe, but it would outlive the master.
        stack.callback(worker.kill)
        yield url, worker


def _wait(url: str, process: "subprocess.Popen[bytes]", errors: Path) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise CannotMeasure(f"nginx ended with {process.returncode}: {errors.read_text()[-500:]}")
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)  # nginx tells nobody when it serves
    raise CannotMeasure("nginx was not ready in time")
