"""A container's health check of the process beside it."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import AsyncExitStack

import grpc
import pytest
import yaml

from cluster import probe
from cluster.cli.cert import make_certificate
from tandem.config.cluster_tls import ClusterTls
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.cluster_grpc import ClusterAuth, make_server, open_port
from tandem.rpc.health import HEALTH_METHOD, SERVING, health_handler

_PATHS: list[str] = []


class _Door(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        _PATHS.append(self.path)
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def listening_port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Door) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def exit_code(tmp_path, role: str, config: object, *options: str) -> int:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(config))
    return probe.main([role, "--config", str(tmp_path / "cluster.yaml"), *options])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_probe_router_connects_where_it_listens(tmp_path, listening_port, host, capsys):
    config = {"router": {"host": host, "port": listening_port, "api_keys": ["k" * 32]}}
    assert exit_code(tmp_path, "router", config) == 0
    assert exit_code(tmp_path, "router", config, "--ready") == 1
    assert capsys.readouterr().err == "router: /readyz: 503\n"
    assert _PATHS[-2:] == ["/health", "/readyz"]


def test_probe_without_listener_is_unhealthy(tmp_path, listening_port):
    nowhere = {"router": {"port": 1}, "decode": {"addresses": ["127.0.0.1:1"]}}
    assert exit_code(tmp_path, "router", nowhere) == 1
    assert exit_code(tmp_path, "decode", nowhere) == 1


def test_probe_worker_uses_the_grpc_health_protocol(tmp_path):
    answers = [SERVING, b"\x08\x02"]
    check = grpc.unary_unary_rpc_method_handler(lambda _request, _context: answers.pop(0))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service, method = HEALTH_METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: check}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        config = {"prefill": {"addresses": ["127.0.0.1:1", f"127.0.0.1:{port}"]}}
        assert [exit_code(tmp_path, "prefill", config, "--index", "1") for _ in range(2)] == [0, 1]
    finally:
        server.stop(None).wait()


async def test_probe_worker_shows_the_certificate_of_cluster_tls(tmp_path):
    make_certificate(tmp_path, "member", days=1)
    tls = {"cert": f"{tmp_path}/member.pem", "key": f"{tmp_path}/member.key", "ca": f"{tmp_path}/ca.pem"}
    async with AsyncExitStack() as stack:
        server = make_server(ClusterAuth(b"s" * 16))
        server.add_generic_rpc_handlers((health_handler(lambda: True),))
        port = await open_port(stack, server, "127.0.0.1", 0, open_credentials(ClusterTls(**tls), ()))
        await server.start()
        stack.push_async_callback(server.stop, None)
        config = {"decode": {"addresses": [f"127.0.0.1:{port}"]}}
        assert await asyncio.to_thread(exit_code, tmp_path, "decode", config) == 1
        assert await asyncio.to_thread(exit_code, tmp_path, "decode", config | {"cluster": {"tls": tls}}) == 0


@pytest.mark.parametrize("mode", ["off", "permissive"])
def test_probe_does_not_repeat_the_warning_of_the_process(tmp_path, caplog, mode):
    make_certificate(tmp_path, "member", days=1)
    tls = {"mode": mode, "cert": f"{tmp_path}/member.pem", "key": f"{tmp_path}/member.key", "ca": f"{tmp_path}/ca.pem"}
    # An address that reaches nobody, beyond loopback: 0.0.0.0/8 is refused at once.
    config = {"decode": {"addresses": ["0.0.0.1:1"]}, "cluster": {"tls": tls}}
    assert exit_code(tmp_path, "decode", config) == 1
    assert caplog.records == []


def test_probe_invalid_configuration_has_its_own_exit_code(tmp_path, capsys):
    assert exit_code(tmp_path, "router", {"router": {"prot": 1}}) == 2
    assert "router.prot" in capsys.readouterr().err
    assert exit_code(tmp_path, "decode", {}) == 2  # it names no address
