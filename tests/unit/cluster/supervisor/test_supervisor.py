"""The supervisor's decisions, without any process."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.supervisor.exceptions import describe_exit
from cluster.supervisor.supervisor import (
    Launch,
    Note,
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
    start_timeout_s=60, stop_early_s=5, stable_s=30, backoff_s=1, max_backoff_s=5, max_rapid_deaths=3
)
NAMES = ("prefill-0", "decode-0", "decode-1", "router")


def make(policy=POLICY):
    return Supervisor(
        [
            ProcessPlan(name="prefill-0", role=Role.PREFILL, drain_s=10),
            ProcessPlan(name="decode-0", role=Role.DECODE, index=0, drain_s=20),
            ProcessPlan(name="decode-1", role=Role.DECODE, index=1, drain_s=20),
            ProcessPlan(name="router", role=Role.ROUTER, drain_s=30),
        ],
        policy,
    )


def running(now=0.0):
    supervisor = make()
    supervisor.start(now)
    for name in NAMES:
        supervisor.on_ready(name, now)
    assert supervisor.phase is Phase.RUNNING
    return supervisor


def launched(actions):
    return [a.name for a in actions if isinstance(a, Launch)]


def sent(actions):
    return [(a.name, a.signum) for a in actions if isinstance(a, Send)]


def test_supervisor_starts_workers_together_then_router():
    supervisor = make()
    assert launched(supervisor.start(0)) == ["prefill-0", "decode-0", "decode-1"]
    assert launched(supervisor.on_ready("decode-1", 1)) == []
    assert launched(supervisor.on_ready("prefill-0", 2)) == []
    assert launched(supervisor.on_ready("decode-0", 3)) == ["router"]
    assert supervisor.phase is Phase.STARTING
    assert supervisor.on_ready("router", 4) == []
    assert supervisor.phase is Phase.RUNNING
    assert supervisor.next_wake() is None


def test_supervisor_exit_during_start_stops_cluster():
    supervisor = make()
    supervisor.start(0)
    supervisor.on_ready("prefill-0", 1)
    actions = supervisor.on_exited("decode-0", 2, 2)
    assert sorted(sent(actions)) == [("decode-1", signal.SIGTERM), ("prefill-0", signal.SIGTERM)]
    assert supervisor.failure == "decode-0 exited with code 2 before it was ready"
    assert supervisor.failed_name == "decode-0"
    assert supervisor.next_wake() == 2 + POLICY.stop_early_s
    supervisor.on_exited("decode-1", 0, 3)
    supervisor.on_exited("prefill-0", 0, 3)
    assert supervisor.phase is Phase.STOPPED


def test_supervisor_rapid_deaths_back_off_then_are_given_up():
    supervisor, now, waits = running(), 0.0, []
    for _ in range(POLICY.max_rapid_deaths):
        actions = supervisor.on_exited("prefill-0", -9, now)
        assert isinstance(actions[0], Note)
        assert "SIGKILL" in actions[0].text
        due = supervisor.next_wake()
        waits.append(due - now)
        assert launched(supervisor.tick(due - 0.01)) == []
        assert launched(supervisor.tick(due)) == ["prefill-0"]
        supervisor.on_ready("prefill-0", due)
        now = due
    assert waits == [1, 2, 4]
    actions = supervisor.on_exited("prefill-0", -9, now)
    assert "abandoned" in actions[0].text
    assert supervisor.state("prefill-0") is ProcessState.ABANDONED
    assert supervisor.phase is Phase.RUNNING  # decode workers compute prompts themselves
    assert supervisor.next_wake() is None


def test_supervisor_restarts_a_decode_worker_before_prefill_workers_if_none_is_left():
    supervisor = running(now=100)
    for name, now in (("prefill-0", 100.0), ("decode-1", 100.1), ("decode-0", 100.2)):
        supervisor.on_exited(name, -9, now)
    assert launched(supervisor.tick(101.0)) == []
    assert supervisor.next_wake() == 101.1
    assert launched(supervisor.tick(101.1)) == ["decode-1", "prefill-0"]
    assert launched(supervisor.tick(101.2)) == ["decode-0"]


def test_supervisor_restarts_workers_that_died_together_decode_first():
    supervisor = running(now=100)
    for name in ("prefill-0", "decode-0", "decode-1"):
        supervisor.on_exited(name, -9, 100.0)
    assert launched(supervisor.tick(101.0)) == ["decode-0", "decode-1", "prefill-0"]


def test_supervisor_restarts_prefill_worker_at_once_while_a_decode_worker_serves():
    supervisor = running(now=100)
    for name, now in (("prefill-0", 100.0), ("decode-1", 100.1)):
        supervisor.on_exited(name, -9, now)
    assert launched(supervisor.tick(101.0)) == ["prefill-0"]


def test_supervisor_stable_time_resets_backoff():
    supervisor = running()
    supervisor.on_exited("decode-0", 1, 1)
    supervisor.tick(2)
    supervisor.on_ready("decode-0", 3)
    supervisor.on_exited("decode-0", 1, 3 + POLICY.stable_s)
    assert supervisor.next_wake() == 3 + POLICY.stable_s + POLICY.backoff_s


def give_up(supervisor, name, now=0.0):
    actions = []
    for _ in range(POLICY.max_rapid_deaths + 1):
        actions = supervisor.on_exited(name, 1, now)
        now = supervisor.next_wake() or now
        supervisor.tick(now)
    return actions


def test_supervisor_last_decode_worker_given_up_ends_cluster():
    supervisor = running()
    give_up(supervisor, "decode-0")
    assert supervisor.phase is Phase.RUNNING
    actions = give_up(supervisor, "decode-1")
    assert supervisor.phase is Phase.STOPPING
    assert sent(actions) == [("router", signal.SIGTERM)]
    assert supervisor.failure.startswith("no decode is left")


def test_supervisor_router_given_up_ends_cluster():
    supervisor = running()
    give_up(supervisor, "router")
    assert supervisor.phase is Phase.STOPPING
    assert supervisor.failed_name == "router"


def test_supervisor_stop_drains_router_before_workers():
    supervisor = running()
    assert sent(supervisor.stop(100)) == [("router", signal.SIGTERM)]
    assert supervisor.stop(101) == []
    assert supervisor.next_wake() == 130
    actions = supervisor.on_exited("router", 0, 110)
    assert sent(actions) == [(name, signal.SIGTERM) for name in NAMES[:3]]
    assert supervisor.next_wake() == 120
    for name in NAMES[:3]:
        assert supervisor.phase is Phase.STOPPING
        assert supervisor.on_exited(name, 0, 111) == []
    assert supervisor.phase is Phase.STOPPED
    assert supervisor.failure is None


def test_supervisor_reload_signals_starting_processes_once_serving():
    supervisor = running()
    assert sent(supervisor.reread()) == [(name, signal.SIGHUP) for name in NAMES]
    supervisor.on_exited(NAMES[0], -9, 101)
    supervisor.tick(supervisor.next_wake())
    assert supervisor.state(NAMES[0]) is ProcessState.STARTING
    assert sent(supervisor.reread()) == [(name, signal.SIGHUP) for name in NAMES[1:]]
    assert sent(supervisor.on_ready(NAMES[0], 102)) == [(NAMES[0], signal.SIGHUP)]
    supervisor.on_exited(NAMES[0], -9, 103)
    supervisor.reread()
    supervisor.tick(supervisor.next_wake())
    assert sent(supervisor.on_ready(NAMES[0], 110)) == [], "it has read them since"
    supervisor.stop(111)
    assert supervisor.reread() == []


def test_supervisor_reload_during_start_reaches_all():
    supervisor = make()
    supervisor.start(0)
    supervisor.on_ready("prefill-0", 1)
    assert sent(supervisor.reread()) == [("prefill-0", signal.SIGHUP)]
    assert sent(supervisor.on_ready("decode-0", 2)) == [("decode-0", signal.SIGHUP)]
    supervisor.on_ready("decode-1", 3)
    assert sent(supervisor.on_ready("router", 4)) == [], "it was started behind the change"


def test_supervisor_drain_beyond_bound_is_killed():
    supervisor = running()
    supervisor.stop(0)
    assert sent(supervisor.tick(29.9)) == []
    assert sent(supervisor.tick(30)) == [("router", signal.SIGKILL)]
    assert supervisor.next_wake() is None
    assert sent(supervisor.on_exited("router", -9, 31)) == [(name, signal.SIGTERM) for name in NAMES[:3]]


def test_supervisor_kill_after_stop_reaches_all():
    supervisor = running()
    supervisor.stop(0)
    assert sent(supervisor.kill(1)) == [(name, signal.SIGKILL) for name in NAMES]
    for name in NAMES:
        assert sent(supervisor.on_exited(name, -9, 2)) == []
    assert supervisor.phase is Phase.STOPPED


def test_supervisor_stop_during_start_signals_all_at_once():
    supervisor = make()
    supervisor.start(0)
    supervisor.on_ready("decode-0", 1)
    assert {name for name, _ in sent(supervisor.stop(2))} == set(NAMES[:3])
    assert supervisor.next_wake() == 2 + POLICY.stop_early_s
    assert supervisor.on_ready("prefill-0", 3) == []
    assert supervisor.state("prefill-0") is ProcessState.STARTING


def test_supervisor_process_in_backoff_is_not_started_after_stop():
    supervisor = running()
    supervisor.on_exited("prefill-0", 1, 0)
    supervisor.stop(0.5)
    assert supervisor.state("prefill-0") is ProcessState.EXITED
    assert launched(supervisor.tick(10)) == []


def test_supervisor_slow_start_is_killed():
    supervisor = make()
    supervisor.start(0)
    assert {name for name, signum in sent(supervisor.tick(60)) if signum is signal.SIGKILL} == set(NAMES[:3])


def test_supervisor_start_timeout_includes_join_time():
    """For a worker whose ranks come from other nodes."""
    supervisor = Supervisor([ProcessPlan(name="decode-0", role=Role.DECODE, join_s=600)], POLICY)
    supervisor.start(0)
    assert sent(supervisor.tick(600)) == []
    assert sent(supervisor.tick(660)) == [("decode-0", signal.SIGKILL)]


def test_supervisor_duplicate_names_are_refused():
    with pytest.raises(InvariantError):
        Supervisor([ProcessPlan(name="a", role=Role.DECODE)] * 2)


def test_describe_exit_names_code_or_signal():
    assert describe_exit(0) == "exited with code 0"
    assert describe_exit(-15) == "was ended by SIGTERM"
    assert describe_exit(-99) == "was ended by signal 99"


@given(
    st.lists(st.tuples(st.sampled_from(("ready", "exit", "tick", "stop", "kill")), st.sampled_from(NAMES)), max_size=60)
)
def test_supervisor_any_event_order_sends_only_valid_actions(events):
    """A simulated set of processes obeys the supervisor; in the end their exits must stop it."""
    supervisor, now, alive, stopping = make(), 0.0, set(), False

    def carry_out(actions):
        for action in actions:
            if isinstance(action, Launch):
                assert action.name not in alive
                assert not stopping
                alive.add(action.name)
            elif isinstance(action, Send):
                assert action.name in alive

    carry_out(supervisor.start(now))
    for kind, name in events:
        now += 1.0
        if kind == "tick":
            now = supervisor.next_wake() or now
            carry_out(supervisor.tick(now))
        elif kind in ("stop", "kill"):
            stopping = True
            carry_out(supervisor.stop(now) if kind == "stop" else supervisor.kill(now))
        elif name in alive and kind == "ready":
            carry_out(supervisor.on_ready(name, now))
        elif name in alive and kind == "exit":
            alive.discard(name)
            actions = supervisor.on_exited(name, 1, now)
            stopping = stopping or supervisor.phase in (Phase.STOPPING, Phase.STOPPED)
            carry_out(actions)
        assert (supervisor.phase is Phase.STOPPED) == (stopping and not alive)
    stopping = True
    carry_out(supervisor.stop(now))
    for _ in range(len(NAMES)):
        for name in sorted(alive):
            alive.discard(name)
            carry_out(supervisor.on_exited(name, 0, now))
    assert supervisor.phase is Phase.STOPPED


def test_supervisor_waiting_for_room_does_not_time_out():
    supervisor = make()
    supervisor.start(0)
    for name in ("prefill-0", "decode-0"):
        supervisor.on_ready(name, 1)
    supervisor.on_room("decode-1", False, 1)
    assert supervisor.next_wake() is None
    assert supervisor.tick(10 * POLICY.start_timeout_s) == []
    supervisor.on_room("decode-1", True, 1000)
    assert supervisor.next_wake() == 1000 + POLICY.start_timeout_s
    assert sent(supervisor.tick(1000 + POLICY.start_timeout_s)) == [("decode-1", signal.SIGKILL)]
    supervisor.on_room("decode-0", False, 1001)  # it serves: where it was before is nothing to us
    assert supervisor.state("decode-0") is ProcessState.READY


def test_supervisor_stop_bounds_process_waiting_for_room():
    supervisor = make()
    supervisor.start(0)
    supervisor.on_room("decode-1", False, 1)
    supervisor.stop(100)
    supervisor.on_room("decode-1", True, 101)
    assert ("decode-1", signal.SIGKILL) in sent(supervisor.tick(100 + POLICY.stop_early_s))


def pair(silence_s=4.0):
    supervisor = Supervisor(
        [
            ProcessPlan(name="decode-0", role=Role.DECODE),
            *(ProcessPlan(name=f"router-{i}", role=Role.ROUTER, index=i, count=2, beats=True) for i in range(2)),
        ],
        RestartPolicy(silence_s=silence_s),
    )
    supervisor.start(0)
    for name in ("decode-0", "router-0", "router-1"):
        supervisor.on_ready(name, 0)
    return supervisor


def pass_time(supervisor, since, until, *, beating=()):
    """Every half second these beat, and the alarm rings when it was set; what that comes to."""
    actions = []
    for half in range(int(2 * since) + 1, int(2 * until) + 1):
        now = half / 2
        for name in beating:
            supervisor.on_beat(name, now)
        if (wake := supervisor.next_wake()) is not None and wake <= now:
            actions += supervisor.tick(now)
    return actions


def test_supervisor_process_without_heartbeat_is_restarted():
    supervisor = pair()
    assert pass_time(supervisor, 0, 60, beating=("router-0", "router-1")) == []
    actions = pass_time(supervisor, 60, 70, beating=("router-0",))
    assert sent(actions) == [("router-1", signal.SIGKILL)]
    assert [a.text for a in actions if isinstance(a, Note)] == ["no heartbeat for 4 s: killed"]
    assert any("restart" in note.text for note in supervisor.on_exited("router-1", -signal.SIGKILL, 70))
    assert launched(pass_time(supervisor, 70, 80, beating=("router-0",))) == ["router-1"]
    # Who has not said yet that it serves is waited for as ever.
    assert pass_time(supervisor, 80, 100, beating=("router-0",)) == []


def test_supervisor_after_own_pause_does_not_count_silence():
    supervisor = pair()
    pass_time(supervisor, 0, 10, beating=("router-0", "router-1"))
    assert supervisor.tick(500.0) == []
    assert pass_time(supervisor, 500, 520, beating=("router-0", "router-1")) == []


def test_supervisor_draining_process_is_killed_at_its_bound():
    supervisor = pair()
    pass_time(supervisor, 0, 10, beating=("router-0", "router-1"))
    supervisor.stop(10)
    assert pass_time(supervisor, 10, 39) == []
    assert sent(pass_time(supervisor, 39, 45)) == [("router-0", signal.SIGKILL), ("router-1", signal.SIGKILL)]
