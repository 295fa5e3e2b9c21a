"""`tandem autoscale` for a running cluster: finds the cluster and its scaler, and gathers the planner's options."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from cluster.autoscaler.kubernetes_scaler import KubernetesScaler
from cluster.autoscaler.live import LiveOptions, autoscale_live
from cluster.autoscaler.local_scaler import ControlScaler
from cluster.control.server import default_path
from cluster.planner.orders import Scaler
from cluster.planner.staffing import LatencyTargets, WorkerModel
from cluster.planner.values import PlannerPolicy, Sizes
from cluster.router_client import ClientError, client_tls
from cluster.simulator.inputs.latency_files import load_latency
from cluster.simulator.model.report import Slo
from cluster.simulator.studies.worker_models import worker_with
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole

DEFAULT_URL = "http://127.0.0.1:8000"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CHUNK_TOKENS = 1024
"""Maximum prompt tokens computed in one step, unless the cluster's YAML sets another limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCommand:
    """Options of the command line."""

    urls: tuple[str, ...] = ()
    socket: Path | None = None
    kubernetes: str | None = None
    """Release name: the StatefulSets are named after it, with `-prefill` and `-decode` appended."""
    api_key_file: Path | None = None
    ca: Path | None = None
    client_cert: Path | None = None
    is_dry_run: bool = False
    as_json: bool = False
    slo: str
    latency: str
    kv_tokens: int
    max_running: int
    period_s: float
    policy: PlannerPolicy
    metrics: str | None = None
    """Address of the metrics server: HOST:PORT, or a port on loopback."""


def run_live(command: LiveCommand) -> int:
    """Run until stopped, and return the exit code. Raises ConfigError for options that contradict each other."""
    if command.socket is not None and command.kubernetes is not None:
        raise ConfigError("give either --socket or --kubernetes, not both")
    slo = Slo.parse(command.slo)
    urls = command.urls or (DEFAULT_URL,)
    scaler = _scaler(command, urls[0])
    policy = command.policy
    if scaler is not None and not scaler.can_flip:
        policy = replace(policy, most_flips=0)
    try:
        tls = client_tls(command.ca, command.client_cert)
    except ClientError as error:
        raise ConfigError(str(error)) from None
    options = LiveOptions(
        urls=urls,
        worker=_worker(command),
        targets=LatencyTargets(ttft_s=slo.ttft_s, itl_s=slo.itl_s),
        policy=policy,
        period_s=command.period_s,
        is_dry_run=command.is_dry_run,
        as_json=command.as_json,
        api_key_file=command.api_key_file,
        tls=tls,
        metrics_address=None if command.metrics is None else address_of(command.metrics),
    )
    return asyncio.run(autoscale_live(options, scaler, _say))


def _scaler(command: LiveCommand, url: str) -> Scaler | None:
    if command.kubernetes is not None:
        sets = {role: f"{command.kubernetes}-{role.value}" for role in WorkerRole}
        return KubernetesScaler(sets)
    if command.socket is not None:
        return ControlScaler(command.socket)
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.hostname in _LOOPBACK and (path := default_path(parts.port or 80)).exists():
        return ControlScaler(path)
    if command.is_dry_run:
        return None
    raise ConfigError(f"no control socket for {url} on this host: give --socket PATH or --kubernetes NAME")


def _worker(command: LiveCommand) -> WorkerModel:
    return worker_with(
        load_latency(command.latency),
        chunk_tokens=_CHUNK_TOKENS,
        kv_tokens=command.kv_tokens,
        max_running=command.max_running,
    )


def sizes_of(text: str) -> Sizes:
    """Parse `PREFILL:DECODE`. Raises ConfigError."""
    prefill, _, decode = text.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) <= 6 for part in (prefill, decode)):
        raise ConfigError(f"{text!r} is not PREFILL:DECODE, such as 1:2")
    return Sizes(prefill=int(prefill), decode=int(decode))


def address_of(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT` or `PORT`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{text!r} is not HOST:PORT or PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _say(line: str) -> None:
    print(line, flush=True)
