"""A worker's life on a fake Ray cluster: placed, reported, signalled, lost."""

import asyncio
import signal
from contextlib import asynccontextmanager

import pytest
import yaml

from cluster.processes.child import Callbacks
from cluster.processes.launcher import EXIT_NOT_STARTED
from cluster.processes.shared_config import SharedConfig
from cluster.ray import launcher as ray_launcher
from cluster.ray.launcher import RayLauncher
from cluster.ray.session import NodeLost, connect
from cluster.supervisor.exceptions import ChangeFailed
from cluster.supervisor.ray_placement import Node
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import open_credentials
from tests.support.cluster.clock_that_jumps import ClockThatJumps

WAIT_S = 20.0
ROOM = {"CPU": 8.0}
NODES = [Node(node_id=name, host=host, total=ROOM, free=ROOM) for name, host in (("a", "10.0.0.1"), ("b", "fd00::2"))]
PLAN = ProcessPlan(name="decode-1", role=Role.DECODE, index=1, address="10.0.0.9:1234")


class FakeHost:
    """An actor; its messages come from `words`, exceptions are raised."""

    def __init__(self, node):
        self.node = node
        self.words = asyncio.Queue()
        self.started = self.config = None
        self.signals = asyncio.Queue()
        self.listens = asyncio.Event()

    async def where(self):
        return self.node.node_id, self.node.host

    async def start(self, role, index, address, config):
        self.started, self.config = (role, index, address), yaml.safe_load(config)
        return 4711

    async def configure(self, config):
        self.config = yaml.safe_load(config)

    async def listen(self):
        self.listens.set()
        word = await self.words.get()
        if isinstance(word, Exception):
            raise word
        return word

    async def send(self, signum):
        self.signals.put_nowait(signum)


class FakeSession:
    """Places an actor on the requested node, as soon as there is room."""

    def __init__(self, *, has_room=True):
        self.hosts = asyncio.Queue()
        self.room = asyncio.Event()
        if has_room:
            self.room.set()
        self.open = 0

    async def nodes(self):
        return NODES

    @asynccontextmanager
    async def host(self, what, bundle, near, lease_s):
        self.open += 1
        try:
            await self.room.wait()
            host = FakeHost(near)
            self.hosts.put_nowait(host)
            yield host
        finally:
            self.open -= 1


class RecordedCallbacks:
    """Records the calls of all callbacks, in order."""

    def __init__(self):
        self.events = []
        self.room = []
        self.logged, self.ended = asyncio.Event(), asyncio.Event()

    def callbacks(self):
        def put(kind):
            return lambda *value: self.events.append((kind, *value))

        def logged(line):
            self.events.append(("log", line))
            self.logged.set()

        def ended(status):
            self.events.append(("exit", status))
            self.ended.set()

        return Callbacks(
            on_loading=lambda report: self.events.append(("loading", report.share)),
            on_ready=put("ready"),
            on_beat=put("beat"),
            on_news=put("news"),
            on_log=logged,
            on_exit=ended,
            on_room=self.room.append,
        )

    async def exit(self):
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        return self.events[-1][1]


def launcher_of(session, **overrides):
    launcher = RayLauncher(session)
    launcher.config = load(None, {name.replace("__", "."): value for name, value in overrides.items()})
    return launcher


async def started(session, launcher):
    recorded = RecordedCallbacks()
    process = launcher.start(PLAN, recorded.callbacks())
    async with asyncio.timeout(WAIT_S):
        host = await session.hosts.get()
        await host.listens.wait()
    return process, host, recorded


async def test_ray_launcher_worker_reports_its_node_address_and_end():
    session = FakeSession()
    process, host, recorded = await started(session, launcher_of(session, secret="s" * 20))
    assert host.started == ("decode", 1, "10.0.0.1:0"), "never where an earlier life of it was"
    assert host.config["secret"] == "s" * 20
    assert process.pid == 4711
    host.words.put_nowait([("log", "hello"), ("loading", {"share": 0.5, "left_s": None}), ("ready", {"address": "x"})])
    host.words.put_nowait([])
    host.words.put_nowait([("news", {"reaches": []}), ("beat", None), ("log", "bye"), ("exit", 0)])
    assert await recorded.exit() == 0
    assert recorded.events == [
        ("log", "hello"),
        ("loading", 0.5),
        ("ready", {"address": "x"}),
        ("news", {"reaches": []}),
        ("beat",),
        ("log", "bye"),
        ("exit", 0),
    ]
    assert session.open == 0


async def test_ray_launcher_lost_node_ends_worker_and_is_avoided():
    session = FakeSession()
    launcher = launcher_of(session)
    _, host, recorded = await started(session, launcher)
    host.words.put_nowait(NodeLost("the node has died"))
    assert await recorded.exit() == -signal.SIGKILL
    assert recorded.events[0] == ("log", "lost together with its node: the node has died")
    _, again, _ = await started(session, launcher)
    assert (host.node.node_id, again.node.node_id) == ("a", "b")
    assert again.started == ("decode", 1, "[fd00::2]:0")
    again.words.put_nowait([("exit", 0)])


async def test_ray_launcher_silent_worker_is_lost():
    session = FakeSession()
    launcher = launcher_of(session)
    impatient = launcher.config.ray.model_copy(update={"silence_s": 0.05})
    launcher.config = launcher.config.model_copy(update={"ray": impatient})
    _, _, recorded = await started(session, launcher)
    assert await recorded.exit() == -signal.SIGKILL
    assert recorded.events[0] == ("log", "lost together with its node: no answer for 0.05 s")
    assert session.open == 0


async def test_ray_launcher_forwards_signals_after_new_configuration():
    session = FakeSession()
    launcher = launcher_of(session)
    process, host, recorded = await started(session, launcher)
    launcher.config = launcher.config.model_copy(update={"log_level": "debug"})
    process.send(signal.SIGHUP)
    process.send(signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        sent = {await host.signals.get() for _ in range(2)}
    assert sent == {signal.SIGHUP, signal.SIGTERM}
    assert host.config["log_level"] == "debug"
    host.words.put_nowait([("exit", 0)])
    assert await recorded.exit() == 0
    process.send(signal.SIGKILL)  # it has ended: nothing happens
    assert not process._orders


async def test_ray_launcher_without_room_reports_repeatedly_and_ends_on_signal(monkeypatch):
    monkeypatch.setattr(ray_launcher, "_ROOM_S", 0.01)
    session, recorded = FakeSession(has_room=False), RecordedCallbacks()
    process = launcher_of(session, ray__decode__cpus=64.0).start(PLAN, recorded.callbacks())
    for _ in range(2):
        async with asyncio.timeout(WAIT_S):
            await recorded.logged.wait()
        recorded.logged.clear()
    line = (
        " WARNING waits for a Ray node with 64 CPU free (10.0.0.1 has 8 CPU; fd00::2 has 8 CPU),"
        " and no node is that large"
    )
    assert recorded.events[:2] == [("log", line), ("log", line)]
    process.send(signal.SIGTERM)
    assert await recorded.exit() == -signal.SIGKILL
    assert recorded.room == [False]
    assert session.open == 0


async def test_ray_launcher_after_finding_room_stops_reporting(monkeypatch):
    monkeypatch.setattr(ray_launcher, "_ROOM_S", 0.01)
    session, recorded = FakeSession(has_room=False), RecordedCallbacks()
    process = launcher_of(session).start(PLAN, recorded.callbacks())
    async with asyncio.timeout(WAIT_S):
        await recorded.logged.wait()
        session.room.set()
        host = await session.hosts.get()
        await host.listens.wait()
    assert recorded.room == [False, True]
    assert process.pid == 4711
    host.words.put_nowait([("exit", 0)])
    assert await recorded.exit() == 0


async def test_ray_launcher_signal_before_start_reports_the_end():
    session, recorded = FakeSession(), RecordedCallbacks()
    launcher_of(session).start(PLAN, recorded.callbacks()).send(signal.SIGTERM)
    assert await recorded.exit() == -signal.SIGKILL
    assert recorded.events == [("exit", -signal.SIGKILL)]
    assert session.hosts.empty()


async def test_ray_launcher_unexpected_error_ends_the_worker(monkeypatch):
    async def refuse(*_):
        raise LookupError("Ray has a new word")

    monkeypatch.setattr(FakeHost, "where", refuse)
    session, recorded = FakeSession(), RecordedCallbacks()
    launcher_of(session).start(PLAN, recorded.callbacks())
    assert await recorded.exit() == -signal.SIGKILL
    assert recorded.events[0] == ("log", "lost because of a Ray error: LookupError: Ray has a new word")
    assert session.open == 0


def test_ray_launcher_after_own_pause_does_not_count_silence():
    async def scenario():
        loop = asyncio.get_running_loop()
        process, host, recorded = await started(session := FakeSession(), launcher_of(session))
        for _ in range(3):
            loop.away_s += 60.0
            # What waited to be read comes behind the timers, which are all due at once.
            passed = loop.create_future()
            loop.call_later(0, loop.call_soon, passed.set_result, None)
            await passed
            host.words.put_nowait([("log", "still here")])
            async with asyncio.timeout(WAIT_S):
                await recorded.logged.wait()
            recorded.logged.clear()
        assert recorded.events == [("log", "still here")] * 3
        host.words.put_nowait([("exit", 0)])
        assert await recorded.exit() == 0
        assert process.pid == 4711

    with asyncio.Runner(loop_factory=ClockThatJumps) as runner:
        runner.run(scenario())


async def test_ray_launcher_failed_start_reports_reason(monkeypatch):
    async def refuse(*_):
        raise ConfigError("model.path: /m is neither a directory nor a hub id")

    monkeypatch.setattr(FakeHost, "start", refuse)
    session, recorded = FakeSession(), RecordedCallbacks()
    launcher_of(session).start(PLAN, recorded.callbacks())
    assert await recorded.exit() == EXIT_NOT_STARTED
    assert recorded.events[0] == ("log", "cannot start: model.path: /m is neither a directory nor a hub id")


def test_ray_launcher_stated_addresses_are_refused():
    config = load(None, {"router.port": 0, "router.grpc_port": 0, "decode.addresses": ["10.0.0.1:9000"]})
    with pytest.raises(ConfigError, match=r"decode\.addresses: not possible with Ray"):
        RayLauncher(FakeSession()).settle(config)


def test_ray_launcher_settle_draws_secret_and_certificates():
    settled = RayLauncher(FakeSession()).settle(load(None, {"router.port": 0, "router.grpc_port": 0}))
    assert settled.secret is not None
    assert open_credentials(settled.cluster.tls, ("10.0.0.2",)) is not None
    plain = {"router.port": 0, "router.grpc_port": 0, "cluster.tls": "off"}
    assert not RayLauncher(FakeSession()).settle(load(None, plain)).cluster.tls.has_certificates
    assert settled.router.port > 0
    assert settled.decode.addresses == ()


def test_ray_launcher_unwritable_configuration_changes_nothing():
    """Nodes take their bundles after it has been written."""
    launcher = RayLauncher(FakeSession())
    shared = SharedConfig(launcher, load(None, {"router.port": 0, "router.grpc_port": 0, "decode.replicas": 1}))
    launcher.open(shared.config)
    try:
        launcher.config_path.unlink()
        launcher.config_path.parent.chmod(0o777)  # others could have written there
        with pytest.raises(ChangeFailed, match="cannot write"):
            shared.resize({Role.DECODE: 2})
        assert (launcher.config.decode.replicas, shared.config.decode.replicas) == (1, 1)
    finally:
        launcher.close()


def test_ray_client_address_is_refused():
    with pytest.raises(ConfigError, match="ray:// is for interactive clients"):
        connect("ray://head:10001", {})
