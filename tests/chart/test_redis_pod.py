"""The chart's Redis as a real process, by its pod's command: it needs its password, which is in no argument."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from tests.chart.pods import containers
from tests.chart.rendering import render
from tests.chart.value_sets import GOOD
from tests.support.redis_server import binary, free_port, until

PASSWORD = """with 'quotes', "more" and \\ and \\n $HOME `id` $(id) #"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    [container] = containers(render(GOOD["defaults"]).pod("redis"))
    # As the kubelet puts variables into commands.
    words = [word.replace("$(REDIS_PASSWORD)", PASSWORD) for word in (*container["command"], *container["args"])]
    assert not [word for word in words if PASSWORD in word]
    port = free_port()
    here = {"6379": str(port), "/data": str(tmp_path)}
    (tmp_path / "redis-server").symlink_to(binary())
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": PASSWORD}
    process = subprocess.Popen([here.get(word, word) for word in words], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


async def test_redis_pod_requires_password_and_hides_it(started: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = started

    def listens() -> bool:
        assert process.poll() is None, "redis-server ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await until(listens, "a listener")
    with Redis(port=port, retry=Retry(NoBackoff(), 0)) as client, pytest.raises(AuthenticationError):
        client.ping()
    with Redis(port=port, password=PASSWORD) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
