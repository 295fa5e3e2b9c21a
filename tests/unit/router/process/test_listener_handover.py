"""Listeners handed from one router to the next, over real sockets."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from router.process import listener_handover
from router.process.listener_handover import ListenerHandover, RunningRouter, wait_for_workers
from router.process.port_steering import steer_to_last
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import RouterConfig
from tandem.errors import ConfigError
from tandem.process.lifetime import Lifetime
from tandem.process.runtime_folder import runtime_folder
from tests.support.router.worker_views import worker

CONNECTIONS = 40


@pytest.fixture
def config(tmp_path):
    tmp_path.chmod(0o700)
    return RouterConfig(port=8123, grpc_port=8124, handover_socket=str(tmp_path / "s.sock"))


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def hands_over(config, server, *, on_handed_over, reached=frozenset, succeeds=False):
    return ListenerHandover(config, lambda: server, reached=reached, on_handed_over=on_handed_over, succeeds=succeeds)


async def find(config):
    return await asyncio.to_thread(RunningRouter.connect, config)


async def test_handover_successor_gets_socket_and_confirms(config, server):
    relieved = asyncio.Event()
    async with hands_over(config, server, on_handed_over=relieved.set) as handing:
        found = await find(config)
        assert found.http.getsockname() == server.getsockname()
        client = socket.create_connection(server.getsockname())
        found.http.settimeout(5.0)
        accepted, _ = found.http.accept()  # what came to the one is there for the other
        assert not handing.is_handed_over
        found.confirm_serving()
        await relieved.wait()
        assert handing.is_handed_over
        for one in (client, accepted, found.http):
            one.close()
        found.close()


async def test_handover_successor_dying_early_changes_nothing(config, server):
    async with hands_over(config, server, on_handed_over=lambda: pytest.fail("relieved")) as handing:
        for _ in range(2):
            found = await find(config)
            found.http.close()
            found.close()
        assert not handing.is_handed_over


async def test_handover_without_matching_router_finds_none(config, server, monkeypatch):
    assert await find(config) is None
    async with hands_over(config, server, on_handed_over=lambda: None):
        with pytest.raises(ConfigError, match="listens on other addresses"):
            await find(config.model_copy(update={"grpc_port": 9}))
    assert await find(config) is None, "it has left nothing"
    monkeypatch.setattr(listener_handover, "_ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(config.handover_socket)
        silent.listen()
        assert await find(config) is None


@pytest.fixture
def unnamed(tmp_path, monkeypatch):
    """Return a configuration that names no folder for the socket."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return RouterConfig(host="127.0.0.1", port=8123, grpc_port=8124)


async def test_handover_same_port_other_address_is_ignored(unnamed, server, caplog):
    async with hands_over(unnamed, server, on_handed_over=lambda: pytest.fail("relieved")):
        other = unnamed.model_copy(update={"host": "127.0.0.2"})
        assert await find(other) is None
        async with hands_over(other, server, on_handed_over=lambda: None):
            assert "another router answers at" in caplog.text
        found = await find(unnamed)
        assert found is not None, "the second one took nothing along"
        found.http.close()
        found.close()
    assert list((runtime_folder()).iterdir()) == []


async def test_router_start_removes_dead_handover_sockets(unnamed, server):
    runtime_folder().mkdir(mode=0o700)
    dead = runtime_folder() / "router-8999.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(dead))
    os.utime(dead, (0, 0))
    async with hands_over(unnamed, server, on_handed_over=lambda: None):
        assert [path.name for path in runtime_folder().iterdir()] == ["router-8123.sock"]


async def test_handover_accepts_again_after_descriptor_shortage(config, server, monkeypatch):
    loop, refused = asyncio.get_running_loop(), asyncio.Event()
    real = loop.sock_accept

    async def accept(listening):
        if not refused.is_set():
            refused.set()
            raise OSError(24, "Too many open files")
        return await real(listening)

    monkeypatch.setattr(loop, "sock_accept", accept)
    monkeypatch.setattr(listener_handover, "_AGAIN_S", 0.0)
    async with hands_over(config, server, on_handed_over=lambda: pytest.fail("relieved")):
        found = await find(config)
        assert refused.is_set()
        assert found is not None
        found.http.close()
        found.close()


class Sessions:
    """A successor's sessions, with its connected workers."""

    def __init__(self):
        self.registry = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: 0.0)
        self.known = {}
        self.lifetime = Lifetime()

    def join(self, name):
        one = worker(name)
        self.known[one.info.key] = f"{name}:1"
        self.registry.joined(one.info, port=None)

    def wait(self, predecessor):
        return asyncio.create_task(
            wait_for_workers(self.registry, lambda: self.known, self.lifetime, predecessor), name="joins"
        )


async def test_handover_successor_waits_for_predecessors_workers(config, server, monkeypatch):
    """Not only for the first: all load of the router would fall on that one."""
    alone = Sessions()
    alone.join("a")
    assert await alone.wait(None)
    reached, called = {"a:1", "b:1"}, asyncio.Event()

    def reached_workers():
        called.set()
        return frozenset(reached)

    async with hands_over(config, server, reached=reached_workers, on_handed_over=lambda: None):
        found, sessions = await find(config), Sessions()
        waits = sessions.wait(found)
        sessions.join("a")
        await called.wait()
        called.clear()
        sessions.join("c")  # has it look again, and wait on
        await called.wait()
        assert not waits.done()
        sessions.join("b")
        assert await waits
        reached.add("d:1")
        waits = sessions.wait(found)
        called.clear()
        await called.wait()
        reached.discard("d:1")  # the predecessor has lost it, too
        assert await waits
        found.http.close()
        found.close()


async def test_handover_wait_for_workers_is_bounded_and_stoppable(config, server, monkeypatch, caplog):
    called = asyncio.Event()

    def reached_workers():
        called.set()
        return frozenset({"a:1", "b:1"})

    async with hands_over(config, server, reached=reached_workers, on_handed_over=lambda: None):
        found, sessions = await find(config), Sessions()
        sessions.join("a")
        waits = sessions.wait(found)
        await called.wait()
        sessions.lifetime.stop()
        assert await waits is False
        monkeypatch.setattr(listener_handover, "_JOIN_S", 0.0)
        sessions.lifetime = Lifetime()
        assert await sessions.wait(found)
        assert "taking over without sessions to b:1" in caplog.text
        found.http.close()
        found.close()


async def test_handover_ended_predecessor_is_not_waited_for(config, server):
    async with hands_over(config, server, reached=lambda: frozenset({"b:1"}), on_handed_over=lambda: None):
        found, sessions = await find(config), Sessions()
    sessions.join("a")
    assert await sessions.wait(found)
    found.http.close()
    found.close()


class HandedOverBefore(ListenerHandover):
    """The protocol without queries: any word but the one that the successor serves ends the connection."""

    async def _offer(self, link):
        with link:
            link.setblocking(False)
            socket.send_fds(link, [self._addresses.as_json()], [self._http().fileno()])
            if await asyncio.get_running_loop().sock_recv(link, 7) == b"serves\n":
                self._on_handed_over()


async def test_handover_from_older_version_succeeds(config, server):
    relieved = asyncio.Event()
    async with HandedOverBefore(config, lambda: server, reached=frozenset, on_handed_over=relieved.set):
        found, sessions = await find(config), Sessions()
        sessions.join("a")
        assert await sessions.wait(found)
        found.confirm_serving()
        await relieved.wait()
        found.http.close()
        found.close()


async def test_handover_silent_predecessor_is_queried_again(config, server, monkeypatch):
    """Otherwise the successor would take over at once, with the first worker only."""
    monkeypatch.setattr(listener_handover, "_ANSWER_S", 0.05)
    monkeypatch.setattr(listener_handover, "_LOOK_S", 0.0)
    called, speaks, sessions = asyncio.Event(), asyncio.Event(), Sessions()

    class Silent(ListenerHandover):
        async def _offer(self, link):
            if not speaks.is_set() and found:
                called.set()
                await speaks.wait()
            await super()._offer(link)

    found = []
    async with Silent(config, lambda: server, reached=lambda: frozenset({"a:1", "b:1"}), on_handed_over=lambda: None):
        found.append(await find(config))
        sessions.join("a")
        waits = sessions.wait(found[0])
        for _ in range(3):
            called.clear()
            await called.wait()
            assert not waits.done()
        sessions.join("b")
        speaks.set()
        assert await waits
        found[0].http.close()
        found[0].close()


async def test_handover_from_silent_predecessor_is_logged(config, server, monkeypatch, caplog):
    monkeypatch.setattr(listener_handover, "_ANSWER_S", 0.05)
    monkeypatch.setattr(listener_handover, "_JOIN_S", 0.0)
    async with hands_over(config, server, on_handed_over=lambda: None) as handing:
        found, sessions = await find(config), Sessions()
        sessions.join("a")
        handing._accepting.cancel()
        assert await sessions.wait(found)
        assert "without knowing the previous router's workers" in caplog.text
        found.http.close()
        found.close()
    found.confirm_serving()
    assert "cannot confirm to the previous router that this one serves" in caplog.text


async def test_handover_of_two_successors_one_stays(config, server, monkeypatch):
    """Only the last one owns the socket's path; no link tells the other."""
    monkeypatch.setattr(listener_handover, "_LOOK_S", 0.01)
    relieved = [asyncio.Event() for _ in range(2)]
    async with hands_over(config, server, on_handed_over=relieved[0].set) as predecessor:
        found = [await find(config) for _ in range(2)]
        async with hands_over(config, server, on_handed_over=relieved[1].set, succeeds=True) as first:
            found[0].confirm_serving()
            await relieved[0].wait()
            await predecessor.close()
            async with hands_over(
                config, server, on_handed_over=lambda: pytest.fail("relieved"), succeeds=True
            ) as last:
                found[1].confirm_serving()
                await relieved[1].wait()
                await first.close()
                assert (first.is_handed_over, last.is_handed_over) == (True, False)
                third = await find(config)
                found.append(third)
    assert not list(Path(config.handover_socket).parent.iterdir())
    for one in found:
        one.http.close()
        one.close()


async def test_handover_successors_unix_socket_survives_predecessor(config, server):
    first = hands_over(config, server, on_handed_over=lambda: None)
    await first.__aenter__()
    async with hands_over(config, server, on_handed_over=lambda: None, succeeds=True):
        await first.close()
        await first.__aexit__(None, None, None)
        found = await find(config)
        assert found is not None
        found.http.close()
        found.close()


async def test_handover_in_shared_folder_is_disabled(config, server, tmp_path, caplog):
    tmp_path.chmod(0o755)
    async with hands_over(config, server, on_handed_over=lambda: None):
        assert "a successor cannot find this router" in caplog.text
        assert await find(config) is None


async def test_handover_from_other_user_is_refused(config, server, tmp_path):
    async with hands_over(config, server, on_handed_over=lambda: pytest.fail("relieved")):
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigError, match="can be written to by others"):
            await find(config)
        tmp_path.chmod(0o700)
        found = await find(config)
        found.http.close()
        found.close()


def accepted(listening):
    """The number of connections in its queue."""
    listening.setblocking(False)
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_port_steering_prefers_last_listener():
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
