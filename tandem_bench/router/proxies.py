"""Other routers as proxies of an upstream that does nothing: their own cost, measured like that of our server.

nginx shows the cost of any proxy written in C. sglang's router (Rust) runs with its defaults.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tandem_bench.errors import CannotMeasure
from tandem_bench.peers.environments import PeerEnvironment, ensure
from tandem_bench.router import costs as router_costs

_START_S = 20.0
_SGLANG = PeerEnvironment(name="sglang-router", steps=(("sglang-router==0.3.2",),))
_CONFIG = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;
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
    request_ms: float
    request_at_capacity_ms: float
    stream_events_per_cpu_s: float


def measure(name: str, *, num_requests: int = 3000) -> PeerCosts:
    """Run one round of a peer. Raises CannotMeasure where it is not available."""
    with serving(name) as (url, process):
        few = router_costs.load(url, process, connections=router_costs.NUM_CLIENTS, requests=num_requests)
        many = router_costs.load(
            url, process, connections=router_costs.NUM_CLIENTS_AT_CAPACITY, requests=2 * num_requests
        )
        body = router_costs.chat_body(max_tokens=router_costs.STREAM_TOKENS, stream=True)
        before_s = router_costs.cpu_s(process)
        streamed = router_costs.run_client(
            url, body, connections=router_costs.NUM_STREAMS, requests=2 * router_costs.NUM_STREAMS
        )
        stream_s = router_costs.cpu_s(process) - before_s
    if streamed["bad"] or streamed["events"] < streamed["requests"] * router_costs.STREAM_TOKENS:
        raise CannotMeasure(f"{name} did not answer everything: {streamed}")
    return PeerCosts(
        request_ms=few.cpu_ms,
        request_at_capacity_ms=many.cpu_ms,
        stream_events_per_cpu_s=streamed["events"] / stream_s,
    )


def serving(name: str, *, step_ms: float = 10.0) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """Run a peer; yields its URL and process. `step_ms`: time of an event of its upstream. Raises CannotMeasure."""
    return _PROXIES[name](step_ms)


@contextmanager
def _nginx(step_ms: float) -> Iterator[tuple[str, psutil.Process]]:
    """Run nginx; yields its URL and its worker process."""
    nginx = shutil.which("nginx")
    if nginx is None:
        raise CannotMeasure("nginx is not installed (Debian: apt-get install nginx-light)")
    with ExitStack() as stack:
        folder, upstream_port, port = _beginning(stack, step_ms)
        file = folder / "nginx.conf"
        file.write_text(_CONFIG.format(folder=folder, upstream=upstream_port, port=port))
        process = router_costs.start(
            stack, [nginx, "-c", str(file), "-e", str(folder / "log")], stderr=subprocess.DEVNULL
        )
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, folder / "log")
        (worker,) = psutil.Process(process.pid).children()
        # The master is killed: a worker ends with its pipe, but not with its master.
        stack.callback(worker.kill)
        yield url, worker


@contextmanager
def _sglang_router(step_ms: float) -> Iterator[tuple[str, psutil.Process]]:
    """Run sglang's router; yields its URL and its process."""
    python = ensure(_SGLANG, lambda _: None)
    with ExitStack() as stack:
        folder, upstream_port, port = _beginning(stack, step_ms)
        (metrics,) = router_costs.free_ports(1)
        log = stack.enter_context((folder / "log").open("wb"))
        command = [
            str(python),
            "-m",
            "sglang_router.launch_router",
            "--worker-urls",
            f"http://127.0.0.1:{upstream_port}",
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        process = router_costs.start(stack, [*command, "--log-level", "warn"], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/health", process, folder / "log")
        yield url, psutil.Process(process.pid)


@contextmanager
def upstream(*, step_ms: float) -> Iterator[str]:
    """Run an HTTP server with fixed answers; yields its URL. `step_ms`: time of an event."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
        (port,) = router_costs.free_ports(1)
        command = [sys.executable, "-m", "tandem_bench.router.upstream", "--port", str(port)]
        process = router_costs.start(stack, [*command, "--step-ms", str(step_ms)])
        _wait(f"http://127.0.0.1:{port}", process, folder / "upstream")
        yield f"http://127.0.0.1:{port}"


def _beginning(stack: ExitStack, step_ms: float) -> tuple[Path, int, int]:
    """Return a folder, the port of a running upstream, and a port for the proxy."""
    url = stack.enter_context(upstream(step_ms=step_ms))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
    (port,) = router_costs.free_ports(1)
    return folder, int(url.rpartition(":")[2]), port


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = log.read_text()[-500:] if log.exists() else ""
            raise CannotMeasure(f"{process.args!r:.80} ended with {process.returncode}: {said}")
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)  # none of them reports when it serves
    raise CannotMeasure(f"{process.args!r:.80} was not ready in time")


_PROXIES: Mapping[str, Callable[[float], AbstractContextManager[tuple[str, psutil.Process]]]] = {
    "nginx": _nginx,
    "sglang-router": _sglang_router,
}
