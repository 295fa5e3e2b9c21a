"""A cluster whose launcher has no room for a worker yet."""

import asyncio
import signal
from pathlib import Path

from cluster.local import LocalCluster
from cluster.supervisor import Policy, ProcessState
from tests.unit.cluster.clock_that_jumps import ClockThatJumps
from tests.unit.cluster.fake_cluster import fake_config

WAIT_S = 20.0
POLICY = Policy(start_timeout_s=60, max_rapid_deaths=2)


class Played:
    """A process that there is not: it serves as soon as it has room, and ends when it is told to."""

    pid = None

    def __init__(self, callbacks, *, has_room):
        self.callbacks = callbacks
        self.signals = []
        asyncio.get_running_loop().call_soon(self.find_room if has_room else lambda: callbacks.on_room(False))

    def find_room(self):
        self.callbacks.on_room(True)
        self.callbacks.on_ready({})

    def send(self, signum):
        self.signals.append(signum)
        if signum is not signal.SIGHUP:
            asyncio.get_running_loop().call_soon(self.callbacks.on_exit, -signum)


class Crowded:
    """A launcher without room for one of its workers."""

    config_path = Path()

    def __init__(self, late):
        self.late = late
        self.started = {}
        self.waits = asyncio.Event()

    def settle(self, config):
        return config

    def open(self, config):
        pass

    def configure(self, config):
        pass

    def address(self, config, role):
        return ""

    def start(self, plan, callbacks):
        assert plan.name not in self.started, "nothing has ended"
        made = self.started[plan.name] = Played(callbacks, has_room=plan.name != self.late)
        if plan.name == self.late:
            self.waits.set()
        return made

    def close(self):
        pass


def test_a_worker_that_waits_for_room_for_long_serves_when_there_is_some():
    async def scenario():
        loop, launcher = asyncio.get_running_loop(), Crowded("decode-1")
        cluster = LocalCluster(fake_config(decode=2), launcher=launcher, policy=POLICY)
        entering = asyncio.ensure_future(cluster.__aenter__())
        async with asyncio.timeout(WAIT_S):
            await launcher.waits.wait()
        late = launcher.started["decode-1"]
        for _ in range(10):
            loop.away_s += POLICY.start_timeout_s
            turned = loop.create_future()
            loop.call_later(0, loop.call_soon, turned.set_result, None)  # behind every timer that is due
            await turned
        assert late.signals == []
        assert {view.name: view.state for view in cluster.workers}["decode-1"] is ProcessState.STARTING
        late.find_room()
        async with asyncio.timeout(WAIT_S):
            await entering
            assert {view.state for view in cluster.processes} == {ProcessState.READY}
            await cluster.__aexit__(None, None, None)

    with asyncio.Runner(loop_factory=ClockThatJumps) as runner:
        runner.run(scenario())


async def test_files_that_change_while_a_worker_waits_for_room_are_read_when_it_serves():
    launcher = Crowded("decode-0")
    cluster = LocalCluster(fake_config(), launcher=launcher, policy=POLICY)
    entering = asyncio.ensure_future(cluster.__aenter__())
    async with asyncio.timeout(WAIT_S):
        await launcher.waits.wait()
        late = launcher.started["decode-0"]
        cluster.request_reread()
        assert late.signals == []
        late.find_room()
        await entering
    assert late.signals == [signal.SIGHUP]
    await cluster.__aexit__(None, None, None)
