"""A cluster whose launcher has no room for a worker yet."""

import asyncio
import signal
from pathlib import Path

import pytest

from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.process_view import SilentWatcher
from cluster.supervisor.supervisor import ProcessState, RestartPolicy
from tests.support.cluster.clock_that_jumps import ClockThatJumps
from tests.support.cluster.fake_cluster import fake_config

WAIT_S = 20.0
POLICY = RestartPolicy(start_timeout_s=60, max_rapid_deaths=2)


class Played:
    """A fake process: it serves as soon as it has room, and ends on a signal."""

    pid = None

    def __init__(self, callbacks, *, has_room, address=None):
        self.address = address
        self.callbacks = callbacks
        self.signals = []
        asyncio.get_running_loop().call_soon(self.find_room if has_room else lambda: callbacks.on_room(False))

    def find_room(self):
        self.callbacks.on_room(True)
        self.callbacks.on_ready({} if self.address is None else {"address": self.address})

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


def test_local_cluster_worker_waiting_for_room_serves_later():
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


class Moving(Crowded):
    """Each worker restarts at another address. `is_full`: the disk is."""

    is_full = False

    def __init__(self):
        super().__init__(None)
        self.num_tries = 0
        self.named = []

    def configure(self, config):
        self.num_tries += 1
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.named.append(config.decode.addresses)

    def start(self, plan, callbacks):
        address = f"10.0.0.{len(self.started)}:7000" if plan.name == "decode-0" else None
        made = self.started[plan.name] = Played(callbacks, has_room=True, address=address)
        return made


class Noting(SilentWatcher):
    def __init__(self):
        self.notes = []

    def on_note(self, note):
        self.notes.append(str(note))


def test_local_cluster_retries_writing_worker_addresses():
    """As soon as writing has failed; routers would otherwise wait for the next change of the set."""

    async def scenario():
        loop, launcher, watcher = asyncio.get_running_loop(), Moving(), Noting()
        cluster = LocalCluster(fake_config(), launcher=launcher, policy=POLICY, watcher=watcher)

        async def until(reached):
            for _ in range(1000):
                if reached():
                    return
                loop.away_s += 1.0  # whatever is due is due now
                await asyncio.sleep(0)
            pytest.fail("it does not come to that")

        async with cluster:
            (first,) = launcher.named[-1]
            launcher.is_full = True
            tries = launcher.num_tries
            launcher.started["decode-0"].send(signal.SIGKILL)
            await until(lambda: launcher.num_tries == tries + 3)
            assert sum("cannot write" in note for note in watcher.notes) == 1
            router = launcher.started["router"]
            num_signals = len(router.signals)
            launcher.is_full = False
            await until(lambda: len(router.signals) > num_signals)
            assert router.signals[num_signals:] == [signal.SIGHUP]
            (now,) = launcher.named[-1]
            assert now == launcher.started["decode-0"].address != first
            tries = launcher.num_tries
            for _ in range(60):
                loop.away_s += 1.0
                await asyncio.sleep(0)
            assert launcher.num_tries == tries, "it is written"

    with asyncio.Runner(loop_factory=ClockThatJumps) as runner:
        runner.run(scenario())


async def test_local_cluster_reload_reaches_worker_once_it_has_room():
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
