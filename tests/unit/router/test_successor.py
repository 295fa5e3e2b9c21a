"""Doors that go from one router to the next, by real sockets."""

import asyncio
import socket

import pytest

from router import successor
from router.steering import steer_to_last
from router.successor import HandsOver, Predecessor
from tandem.config import RouterConfig
from tandem.errors import ConfigError

CONNECTIONS = 40


@pytest.fixture
def config(tmp_path):
    tmp_path.chmod(0o700)
    return RouterConfig(port=8123, grpc_port=8124, handover_socket=str(tmp_path / "s.sock"))


@pytest.fixture
def door():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


async def find(config):
    return await asyncio.to_thread(Predecessor.find, config)


async def test_a_successor_gets_the_very_socket_and_relieves(config, door):
    relieved = asyncio.Event()
    async with HandsOver(config, lambda: door, relieved=relieved.set) as handing:
        found = await find(config)
        assert found.http.getsockname() == door.getsockname()
        client = socket.create_connection(door.getsockname())
        found.http.settimeout(5.0)
        accepted, _ = found.http.accept()  # what came to the one is there for the other
        assert not handing.is_relieved
        found.relieve()
        await relieved.wait()
        assert handing.is_relieved
        for one in (client, accepted, found.http):
            one.close()
        found.close()


async def test_one_that_dies_before_it_serves_changes_nothing(config, door):
    async with HandsOver(config, lambda: door, relieved=lambda: pytest.fail("relieved")) as handing:
        for _ in range(2):
            found = await find(config)
            found.http.close()
            found.close()
        assert not handing.is_relieved


async def test_nobody_is_found_where_nobody_is_or_other_doors_are(config, door, monkeypatch):
    assert await find(config) is None
    async with HandsOver(config, lambda: door, relieved=lambda: None):
        with pytest.raises(ConfigError, match="has other doors"):
            await find(config.model_copy(update={"grpc_port": 9}))
    assert await find(config) is None, "it has left nothing"
    monkeypatch.setattr(successor, "_ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(config.handover_socket)
        silent.listen()
        assert await find(config) is None


async def test_the_successors_own_socket_stays_when_the_predecessor_leaves(config, door):
    first = HandsOver(config, lambda: door, relieved=lambda: None)
    await first.__aenter__()
    async with HandsOver(config, lambda: door, relieved=lambda: None):
        await first.close()
        await first.__aexit__(None, None, None)
        found = await find(config)
        assert found is not None
        found.http.close()
        found.close()


async def test_where_others_can_enter_nobody_is_awaited(config, door, tmp_path, caplog):
    tmp_path.chmod(0o755)
    async with HandsOver(config, lambda: door, relieved=lambda: None):
        assert "a successor will not find this router" in caplog.text
        assert await find(config) is None


async def test_whoever_could_be_somebody_else_is_not_believed(config, door, tmp_path):
    async with HandsOver(config, lambda: door, relieved=lambda: pytest.fail("relieved")):
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigError, match="can be written to by others"):
            await find(config)
        tmp_path.chmod(0o700)
        found = await find(config)
        found.http.close()
        found.close()


def accepted(listening):
    """How many connections are in its queue."""
    listening.setblocking(False)
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_the_kernel_brings_what_is_new_to_the_last_of_two_and_then_to_the_only_one():
    first = socket.create_server(("127.0.0.1", 0), reuse_port=True)
    address = first.getsockname()
    with socket.create_server(address, reuse_port=True) as second:
        assert steer_to_last(address[1])
        clients = [socket.create_connection(address) for _ in range(CONNECTIONS)]
        assert (accepted(first), accepted(second)) == (0, CONNECTIONS)
        first.close()
        clients += [socket.create_connection(address) for _ in range(CONNECTIONS)]
        assert accepted(second) == CONNECTIONS
        for client in clients:
            client.close()
    assert not steer_to_last(address[1])
