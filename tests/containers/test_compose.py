"""The whole of deploy/compose.yaml but Grafana, in containers."""

import time
import urllib.error
from collections.abc import Callable

import pytest

from tests.containers.composed import LEFT_OUT, Composed
from tests.containers.engine import Engine, EngineFailed
from tests.containers.images import Images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
_PATIENCE_S = 300.0


def until(reached: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + _PATIENCE_S
    while not reached():
        assert time.monotonic() < ends_s, what
        time.sleep(0.5)


def test_compose_cluster_serves_and_is_monitored(engine: Engine, images: Images) -> None:
    with Composed(engine, images) as composed:
        names = composed.up()
        assert {"router", "prefill-0", "decode-0", "decode-1", "redis", "prometheus", "collector"} == set(names)
        assert "grafana" in LEFT_OUT
        with pytest.raises(urllib.error.HTTPError, match="401"):
            composed.ask(None, _TRACE_ID)
        answer = composed.ask(composed.secret("first_key"), _TRACE_ID)
        assert answer["usage"]["completion_tokens"] == 8
        check_walls(composed)
        until(lambda: composed.value('up{job="tandem"}') == "1", "Prometheus scrapes the router")
        until(lambda: composed.value('up{job="collector"}') == "1", "and the collector")
        until(lambda: composed.value("count(count by(worker)(tandem_worker_requests))") == "3", "it sees three workers")
        until(lambda: f"{_TRACE_ID} tandem.decode" in composed.log("collector"), "the collector has the trace")
        composed.compose("stop", "--timeout", "60", "router", "prefill-0", "decode-0", "decode-1")
        for name in ("router", "prefill-0", "decode-0", "decode-1"):
            assert composed.container(name)["State"]["ExitCode"] == 0, f"{name}: {composed.log(name)[-2000:]}"


def check_walls(composed: Composed) -> None:
    """Each container's isolation as the file states it and the engine applied it."""
    for name in ("router", "decode-0"):
        with pytest.raises(EngineFailed, match="Read-only file system"):
            composed.run_in(name, "touch", "/opt/tandem/anything")
        status = composed.run_in(name, "cat", "/proc/self/status")
        rights = {line.split()[0]: line.split()[1] for line in status.splitlines() if line.startswith(("Cap", "NoNew"))}
        assert rights["CapEff:"] == rights["CapBnd:"] == "0000000000000000"
        assert rights["NoNewPrivs:"] == "1"
        assert composed.run_in(name, "id", "--user").strip() != "0"
    outside = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    with pytest.raises(EngineFailed, match=r"unreachable|timed out|No route"):
        composed.run_in("decode-0", "python3", "-c", outside)
