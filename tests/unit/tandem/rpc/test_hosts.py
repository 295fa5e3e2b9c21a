"""A port in use is reported in one line, before anything is loaded."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

import decode_worker.__main__
import prefill_worker.__main__
import router.__main__
from tandem.config.cluster import ClusterConfig, load
from tandem.config.pools import PoolConfig
from tandem.config.worker import free_address
from tandem.process.lifetime import Lifetime, RouterPlace, WorkerPlace
from tandem.rpc.hosts import hold


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with hold("127.0.0.1", 0) as held:
        yield held


def test_hold_reserves_port_until_closed(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
        hold("127.0.0.1", port)
    taken.close()
    hold("127.0.0.1", port).close()


def test_hosts_ipv6_brackets_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[str, int]] = []

    def look(host: str, port: int) -> socket.socket:
        looked_at.append((host, port))
        return socket.socket()

    monkeypatch.setattr("tandem.config.worker.hold", look)
    assert free_address(PoolConfig(addresses=("[::1]:4001",)), "decode", 0) == ("[::1]", 4001)
    assert looked_at == [("::1", 4001)]


def test_health_port_that_is_taken_is_found_with_the_address(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    pool = PoolConfig(addresses=("127.0.0.1:0", "127.0.0.1:0"), health_port=port - 1)
    with pytest.raises(OSError, match=rf"^decode\.health_port: cannot listen on 127.0.0.1:{port}: Address already"):
        free_address(pool, "decode", 1)
    with pytest.raises(OSError, match=rf"^decode\.health_port: cannot listen on 127.0.0.1:{port}: Address already"):
        free_address(pool, "decode", 1, stated="127.0.0.1:0")


def _config(taken: socket.socket) -> ClusterConfig:
    """Configuration with a missing model: loading it before checking the port would fail."""
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    return load(
        None,
        {
            "model.path": "/nowhere",
            "secret": "s" * 32,
            "router.port": taken.getsockname()[1],
            "prefill.addresses": [address],
            "decode.addresses": [address],
        },
    )


@pytest.mark.parametrize("serve", [prefill_worker.__main__.serve, decode_worker.__main__.serve])
async def test_worker_checks_port_before_loading_model(taken: socket.socket, serve: Any) -> None:
    with pytest.raises(OSError, match=r"^cannot listen on 127.0.0.1:\d+: Address already in use$"):
        await serve(_config(taken), WorkerPlace(), Lifetime())


async def test_router_checks_ports_before_waiting_for_workers(taken: socket.socket) -> None:
    with pytest.raises(OSError, match=r"^cannot listen on 127.0.0.1:\d+: Address already in use$"):
        await router.__main__.serve(_config(taken), RouterPlace(), Lifetime())
