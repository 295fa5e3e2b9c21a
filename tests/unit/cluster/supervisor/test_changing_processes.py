"""The set of processes changes while the supervisor keeps it alive."""

import copy
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.supervisor.supervisor import (
    Gone,
    Launch,
    Phase,
    ProcessPlan,
    ProcessState,
    RestartPolicy,
    Role,
    Send,
    Supervisor,
)
from tandem.errors import InvariantError

POLICY = RestartPolicy(
    start_timeout_s=60, stop_early_s=5, stable_s=30, backoff_s=1, max_backoff_s=5, max_rapid_deaths=2
)
FIRST = ("prefill-0", "decode-0", "router-0")
KINDS = ("add", "add", "retire", "ready", "exit", "no room", "room", "tick", "tick")
NAMES = (*FIRST, "prefill-1", "decode-1", "router-1")


def plan(name):
    role, _, index = name.partition("-")
    return ProcessPlan(name=name, role=Role(role), index=int(index), drain_s=10)


def running():
    supervisor = Supervisor([plan(name) for name in FIRST], POLICY)
    supervisor.start(0)
    for name in FIRST:
        supervisor.on_ready(name, 0)
    assert supervisor.phase is Phase.RUNNING
    return supervisor


def test_supervisor_added_process_waits_for_room_within_bound():
    """Its requester gets an answer, and may make another request."""
    supervisor = running()
    supervisor.add(plan("decode-1"), 10)
    supervisor.on_room("decode-1", False, 11)
    assert supervisor.next_wake() == 10 + POLICY.start_timeout_s
    supervisor.on_room("decode-1", True, 50)
    assert supervisor.next_wake() == 50 + POLICY.start_timeout_s
    (kill,) = [one for one in supervisor.tick(50 + POLICY.start_timeout_s) if isinstance(one, Send)]
    assert kill == Send(name="decode-1", signum=signal.SIGKILL)


def test_supervisor_restarted_member_waits_for_room_unbounded():
    supervisor = running()
    supervisor.on_exited("decode-0", 1, 10)
    assert supervisor.tick(11) == [Launch(name="decode-0")]
    supervisor.on_room("decode-0", False, 11)
    assert supervisor.next_wake() is None
    supervisor.on_room("decode-0", True, 5000)
    supervisor.on_ready("decode-0", 5010)
    assert supervisor.state("decode-0") is ProcessState.READY


class World:
    """Processes that obey a supervisor; raises for impossible orders."""

    def __init__(self):
        self.supervisor = running()
        self.there, self.alive = set(FIRST), set(FIRST)
        self.served, self.retired = set(FIRST), set()
        self.gone = []

    def carry_out(self, actions):
        for action in actions:
            match action:
                case Launch():
                    assert action.name not in self.alive
                    assert action.name not in self.retired, "who is retired is never started again"
                    assert self.supervisor.phase is not Phase.STOPPING
                    self.alive.add(action.name)
                case Send():
                    assert action.name in self.alive
                case Gone():
                    assert action.name not in self.alive
                    assert (action.failure is None) == (action.name in self.retired or action.name in self.served)
                    self.there.discard(action.name)
                    self.retired.discard(action.name)
                    self.served.discard(action.name)
                    self.gone.append(action.name)

    def happen(self, kind, name, now):
        supervisor = self.supervisor
        is_running = supervisor.phase is Phase.RUNNING
        if kind == "add" and is_running and name not in self.there:
            self.there.add(name)
            self.carry_out(supervisor.add(plan(name), now))
            assert not supervisor.is_member(name)
        elif kind == "retire" and is_running and name in self.there:
            self.retired.add(name)
            self.carry_out(supervisor.retire(name, now))
            assert name not in self.there or supervisor.state(name) is ProcessState.RETIRING
        elif kind == "ready" and name in self.alive:
            self.carry_out(supervisor.on_ready(name, now))
            if name not in self.retired and supervisor.phase is Phase.RUNNING:
                self.served.add(name)
                assert supervisor.is_member(name)
        elif kind == "exit" and name in self.alive:
            self.alive.discard(name)
            self.carry_out(supervisor.on_exited(name, 1, now))
        elif kind in ("room", "no room") and name in self.alive:
            waited = supervisor.state(name) is ProcessState.STARTING and is_running and supervisor.is_member(name)
            supervisor.on_room(name, kind == "room", now)
            if waited and kind == "no room":
                assert Send(name=name, signum=signal.SIGKILL) not in copy.deepcopy(supervisor).tick(now + 1e6)
        elif kind == "stop":
            self.carry_out(supervisor.stop(now))
        elif kind == "tick":
            self.carry_out(supervisor.tick(now))


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES)),
        max_size=60,
    ),
    st.booleans(),
)
def test_supervisor_any_event_order_keeps_requested_set(events, stops):
    world, now = World(), 0.0
    for kind, name in events:
        now += 1.0
        if kind == "tick":
            now = max(now, world.supervisor.next_wake() or now)
        world.happen(kind, name, now)
    if stops:
        world.happen("stop", "", now)
        for _ in NAMES:
            for name in sorted(world.alive):
                world.happen("exit", name, now)
        assert world.supervisor.phase is Phase.STOPPED
    elif world.supervisor.phase is Phase.RUNNING:
        for name in sorted(world.retired & world.alive):
            world.happen("exit", name, now)
        assert not world.retired & world.there


def test_supervisor_added_process_is_member_once_ready():
    supervisor = running()
    assert supervisor.add(plan("decode-1"), 1) == [Launch(name="decode-1")]
    assert not supervisor.is_member("decode-1")
    supervisor.on_ready("decode-1", 2)
    assert supervisor.is_member("decode-1")
    supervisor.on_exited("decode-1", 1, 3)
    assert supervisor.state("decode-1") is ProcessState.BACKOFF, "from now on it is kept alive like all others"
    assert supervisor.tick(supervisor.next_wake()) == [Launch(name="decode-1")]


def test_supervisor_added_process_hanging_at_start_is_killed():
    supervisor = running()
    supervisor.add(plan("decode-1"), 1)
    assert supervisor.next_wake() == 1 + POLICY.start_timeout_s
    assert Send(name="decode-1", signum=signal.SIGKILL) in supervisor.tick(1 + POLICY.start_timeout_s)
    (gone,) = supervisor.on_exited("decode-1", -9, 70)
    assert gone == Gone(name="decode-1", failure="decode-1 was ended by SIGKILL before it was ready")
    assert supervisor.phase is Phase.RUNNING


def test_supervisor_retired_process_exit_is_no_failure():
    supervisor = running()
    assert supervisor.retire("prefill-0", 1) == [Send(name="prefill-0", signum=signal.SIGTERM)]
    assert supervisor.retire("prefill-0", 2) == []
    assert supervisor.next_wake() == 11, "it has its drain"
    assert Send(name="prefill-0", signum=signal.SIGKILL) in supervisor.tick(11)
    assert supervisor.on_exited("prefill-0", -9, 12) == [Gone(name="prefill-0")]
    with pytest.raises(KeyError):
        supervisor.state("prefill-0")


def test_supervisor_retired_process_in_backoff_is_gone_at_once():
    supervisor = running()
    supervisor.on_exited("prefill-0", 1, 1)
    assert supervisor.retire("prefill-0", 1) == [Gone(name="prefill-0")]
    assert supervisor.next_wake() is None


def test_supervisor_stop_keeps_drain_time_of_retiring_router():
    supervisor = running()
    supervisor.retire("router-0", 1)
    assert supervisor.stop(5) == [], "the workers have to wait for what it still answers"
    assert supervisor.next_wake() == 11
    assert {action.name for action in supervisor.on_exited("router-0", 0, 6)} == {"prefill-0", "decode-0"}


def test_supervisor_last_decode_given_up_beside_retiring_one_fails():
    supervisor, now = running(), 0.0
    supervisor.add(plan("decode-1"), now)
    supervisor.on_ready("decode-1", now)
    supervisor.retire("decode-1", now)
    for _ in range(POLICY.max_rapid_deaths + 1):
        supervisor.on_exited("decode-0", 1, now)
        due = [at for at in (supervisor.next_wake(),) if at is not None]
        now = max([now, *due])
        supervisor.tick(now)
    assert supervisor.failure is not None
    assert supervisor.failure.startswith("no decode is left")


def test_supervisor_add_and_retire_require_running_cluster():
    supervisor = Supervisor([plan(name) for name in FIRST], POLICY)
    supervisor.start(0)
    with pytest.raises(InvariantError, match="starting"):
        supervisor.add(plan("decode-1"), 0)
    with pytest.raises(InvariantError, match="starting"):
        supervisor.retire("decode-0", 0)
    with pytest.raises(InvariantError, match="there is already a process decode-0"):
        running().add(plan("decode-0"), 0)


def test_supervisor_notifies_only_routers_of_workers():
    supervisor = running()
    assert supervisor.reread(Role.ROUTER) == [Send(name="router-0", signum=signal.SIGHUP)]
    assert len(supervisor.reread()) == 3
