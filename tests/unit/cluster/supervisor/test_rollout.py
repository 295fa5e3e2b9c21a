"""Changes of a running cluster, with processes that start, die and stall at hypothesis' choice."""

from copy import copy
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.control.operations import plan_change
from cluster.control.wire import RestartRequest
from cluster.supervisor.rollout import (
    Add,
    ChangeRefused,
    Member,
    Progress,
    Retire,
    Rollout,
    RolloutState,
    flip_steps,
    missing_contacts,
    replacement_steps,
    scale_steps,
    sizes_of,
)
from cluster.supervisor.supervisor import ProcessState, Role

WORKERS = (Role.PREFILL, Role.DECODE)
KNOWN_S = 5.0
ENDLESS = 400


def member(role, index, state=ProcessState.READY, reaches=None):
    address = "" if role is Role.ROUTER else f"{role.value}:{index}"
    return Member(role=role, index=index, state=state, address=address, reaches=reaches)


def cluster(prefill=1, decode=1, routers=1, states=()):
    """`states`: those of the first processes, which need not serve."""
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: routers}
    made = {f"{role.value}-{i}": member(role, i) for role, count in counts.items() for i in range(count)}
    unwell = dict(zip(made, states, strict=False))
    return all_connected({name: replace(one, state=unwell.get(name, one.state)) for name, one in made.items()})


def all_connected(members):
    """A router that is starting, or has died, knows no worker: one that flickers must not be taken for a good one."""
    workers = frozenset(m.address for m in members.values() if m.role is not Role.ROUTER and m.serves)
    return {
        n: replace(m, reaches=workers if m.serves else None) if m.role is Role.ROUTER else m for n, m in members.items()
    }


def serving(members):
    return {role: sum(m.role is role and m.serves for m in members.values()) for role in Role}


def present(members):
    """The desired processes, whether or not they serve just now."""
    return {role: sizes_of(members)[role] for role in Role}


def staying(members):
    """Including given-up processes, which a restart revives."""
    return {
        role: sum(m.role is role and m.state is not ProcessState.RETIRING for m in members.values()) for role in Role
    }


def alive(members):
    """Processes that take room."""
    states = (ProcessState.STARTING, ProcessState.READY, ProcessState.RETIRING, ProcessState.BACKOFF)
    return {role: sum(m.role is role and m.state in states for m in members.values()) for role in Role}


@dataclass
class World:
    """Carries out a rollout's orders; `fates` decide the outcome of each added process."""

    members: dict
    fates: list
    abort_at: float | None = None
    now: float = 0.0
    fewest: dict = field(default_factory=dict)
    """That served at once, by role."""
    most: dict = field(default_factory=dict)
    """That took room at once."""
    births: dict = field(default_factory=dict)
    """By name: how many have had it."""
    retired: list = field(default_factory=list)
    """Name and birth; those that were there before were not born."""
    needed: set = field(default_factory=set)
    revives: bool = False
    """Who had died when it began serves again after a while."""
    flickering: set = field(default_factory=set)
    """Those that died as soon as they served, and will serve again."""

    def run(self, rollout):
        self.fewest, self.most = serving(self.members), alive(self.members)
        for _ in range(ENDLESS):
            if self.abort_at is not None and self.now >= self.abort_at:
                rollout.abort("taken back")
            orders = rollout.advance(self.members, self.now)
            for order in orders:
                self.carry_out(order, rollout)
            if rollout.state is not RolloutState.UNDER_WAY:
                return
            if not orders:
                self.pass_time(rollout)
        raise AssertionError("it never ends")

    def carry_out(self, order, rollout):
        match order:
            case Add():
                name = f"{order.role.value}-{order.index}"
                assert name not in self.members
                self.births[name] = self.births.get(name, 0) + 1
                new = member(order.role, order.index, ProcessState.STARTING)
                address = new.address and f"{new.address}:{self.births[name]}"  # a port of its own
                self.members[name] = replace(new, address=address)
                self.needed |= {name} if order.is_needed else set()
                rollout.started(name)
            case Retire():
                self.retired.append((order.name, self.births.get(order.name, 0)))
                if self.members[order.name].state in (ProcessState.BACKOFF, ProcessState.ABANDONED):
                    self.leave(order.name, rollout, None)
                else:
                    self.members[order.name] = replace(self.members[order.name], state=ProcessState.RETIRING)
        self.note()

    def leave(self, name, rollout, failure):
        del self.members[name]
        rollout.on_exit(name, failure)

    def pass_time(self, rollout):
        """Starting processes come up or fail, leaving ones end, routers learn of workers."""
        self.now += 1.0
        for name, one in list(self.members.items()):
            if one.state is ProcessState.RETIRING:
                self.leave(name, rollout, None)
            elif name in self.flickering:
                self.flicker(name, one)
            elif one.state is ProcessState.BACKOFF and self.revives:
                self.members[name] = replace(one, state=ProcessState.READY)
                self.members = all_connected(self.members)
            elif one.state is ProcessState.STARTING:
                self.apply_fate(name, one, rollout)
        self.note()

    def apply_fate(self, name, one, rollout):
        fate = self.fates.pop(0) if self.fates else "serves"
        if fate == "dies" and name not in self.needed:
            self.leave(name, rollout, f"{name} exited")
        elif fate not in ("waits", "dies"):
            state = ProcessState.ABANDONED if fate == "abandoned" else ProcessState.READY
            self.members[name] = replace(one, state=state)
            if fate == "flickers":
                self.flickering.add(name)
            if fate == "serves":
                self.members = all_connected(self.members)

    def flicker(self, name, one):
        """Before any process knows it, so that none relies on it."""
        back = one.state is ProcessState.BACKOFF
        self.members[name] = replace(one, state=ProcessState.READY if back else ProcessState.BACKOFF)
        if back:
            self.flickering.discard(name)
            self.members = all_connected(self.members)

    def note(self):
        now, room = serving(self.members), alive(self.members)
        self.fewest = {role: min(count, now[role]) for role, count in self.fewest.items()}
        self.most = {role: max(count, room[role]) for role, count in self.most.items()}


FATES = st.lists(
    st.sampled_from(["serves", "serves", "serves", "waits", "dies", "abandoned", "unknown", "flickers"]), max_size=12
)
WELL = [ProcessState.READY] * 3
STATES = st.lists(st.sampled_from([*WELL, ProcessState.BACKOFF, ProcessState.ABANDONED]), max_size=6)
CLUSTERS = st.builds(cluster, st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), STATES)
ROLES = st.lists(st.sampled_from(list(Role)), min_size=1, max_size=3, unique=True)


@given(CLUSTERS, FATES, ROLES)
def test_rollout_restart_keeps_capacity_and_failed_process(members, fates, roles):
    before = dict(members)
    world = World(dict(members), list(fates))
    rollout = Rollout(replacement_steps(members, roles), known_s=KNOWN_S)
    world.run(rollout)
    assert all(world.fewest[role] >= count for role, count in serving(before).items())
    assert len(world.retired) == len(set(world.retired)), "nobody twice"
    replaced = {name for name, birth in world.retired if birth == 0}
    if rollout.state is RolloutState.DONE:
        for role in Role:
            wanted = sum(m.role is role for m in before.values()) if role in roles else serving(before)[role]
            assert serving(world.members)[role] == wanted
        assert replaced == {n for n, m in before.items() if m.role in roles}
    else:
        assert rollout.failure
        assert all(world.members[name] == before[name] for name in before.keys() - replaced if name in unmoved(before))
    assert rollout.advance(world.members, world.now) == []


def test_rollout_restart_by_name_replaces_each_once():
    members = cluster(2, 3, 1)
    assert [step.retire for step in replacement_steps(members, [], ["decode-2", "decode-0", "decode-2"])] == [
        "decode-2",
        "decode-0",
    ]
    both = replacement_steps(members, [Role.PREFILL], ["prefill-1", "decode-1"], in_place={"decode-1"})
    assert [(step.add, step.retire, step.in_place) for step in both] == [
        (Role.PREFILL, "prefill-0", False),
        (Role.PREFILL, "prefill-1", False),
        (Role.DECODE, "decode-1", True),
    ]
    members["decode-1"] = replace(members["decode-1"], state=ProcessState.RETIRING)
    with pytest.raises(
        ChangeRefused, match=r"unknown process decode-1; the processes are: decode-0, decode-2, prefill-0"
    ):
        replacement_steps(members, [], ["decode-1"])


def test_rollout_named_restart_counts_given_up_worker_again():
    members = {**cluster(1, 2, 1), "decode-1": Member(role=Role.DECODE, index=1, state=ProcessState.ABANDONED)}
    for request, decode in ((RestartRequest(names=("decode-1",)), 2), (RestartRequest(names=("decode-0",)), 1)):
        assert plan_change(request, members).sizes == {Role.PREFILL: 1, Role.DECODE: decode}


def unmoved(members):
    """Processes whose view of others is constant: all but routers."""
    return {name for name, one in members.items() if one.role is not Role.ROUTER}


@example(cluster(0, 1, 1, [ProcessState.BACKOFF]), ["waits", "flickers"], [Role.ROUTER])
@given(CLUSTERS, FATES, ROLES)
def test_rollout_in_place_restart_uses_no_extra_room(members, fates, roles):
    before, workers = dict(members), {n for n, m in members.items() if m.role is not Role.ROUTER}
    world = World(dict(members), list(fates), revives=True)
    rollout = Rollout(replacement_steps(members, roles, in_place=workers), known_s=KNOWN_S)
    world.run(rollout)
    for role in WORKERS:
        assert world.most[role] <= max(alive(before)[role], sum(m.role is role for m in before.values()))
        assert world.fewest[role] >= serving(before)[role] - 1
    if serving(before)[Role.DECODE] and present(before)[Role.DECODE] > 1:
        assert world.fewest[Role.DECODE], "one that is on its way is waited for"
    assert world.fewest[Role.ROUTER] >= serving(before)[Role.ROUTER]
    if rollout.state is RolloutState.DONE:
        assert all(serving(world.members)[role] == sum(m.role is role for m in before.values()) for role in roles)
    else:
        assert rollout.failure


@given(CLUSTERS, FATES, ROLES, st.booleans(), st.integers(0, 12))
def test_rollout_aborted_change_keeps_capacity_and_full_members(members, fates, roles, in_place, abort_at):
    before = dict(members)
    world = World(dict(members), list(fates), abort_at=float(abort_at))
    workers = {n for n, m in members.items() if m.role is not Role.ROUTER}
    rollout = Rollout(replacement_steps(members, roles, in_place=workers if in_place else ()), known_s=KNOWN_S)
    world.run(rollout)
    if rollout.failure != "taken back":
        return
    assert world.now <= abort_at + 1.0, "it ends when the one that leaves has left, whatever is starting"
    assert all(staying(world.members)[role] >= count for role, count in staying(before).items())
    starting = {n for n, m in world.members.items() if m.state is ProcessState.STARTING}
    assert starting <= world.needed
    if not in_place:
        assert all(world.fewest[role] >= count for role, count in serving(before).items())


def test_rollout_process_that_keeps_dying_is_reported():
    rollout = Rollout(scale_steps(cluster(), {Role.DECODE: 2}), known_s=KNOWN_S)
    rollout.advance(cluster(), 0.0)
    rollout.started("decode-1")
    grown = cluster() | {"decode-1": member(Role.DECODE, 1, ProcessState.ABANDONED)}
    assert rollout.advance(grown, 1.0) == [Retire(name="decode-1")]
    rollout.on_exit("decode-1", None)
    assert rollout.failure == "decode-1 keeps dying"


@given(CLUSTERS, FATES, st.integers(0, 4), st.integers(1, 4))
def test_rollout_scaling_ends_at_requested_sizes_or_reports_failure(members, fates, prefill, decode):
    wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
    before = serving(members)
    world = World(dict(members), list(fates))
    rollout = Rollout(scale_steps(members, wanted), known_s=KNOWN_S)
    world.run(rollout)
    assert all(world.fewest[role] >= min(before[role], size) for role, size in wanted.items())
    assert world.fewest[Role.ROUTER] == before[Role.ROUTER]
    if rollout.state is RolloutState.DONE:
        assert all(present(world.members)[role] == size for role, size in wanted.items())
        assert all(m.state is not ProcessState.ABANDONED for m in world.members.values() if m.role in wanted)


@given(CLUSTERS, FATES, st.sampled_from(WORKERS))
def test_rollout_flip_moves_one_worker_and_keeps_a_decode_worker(members, fates, to):
    before, world = serving(members), World(dict(members), list(fates))
    other = Role.PREFILL if to is Role.DECODE else Role.DECODE
    try:
        steps = flip_steps(members, to)
    except ChangeRefused:
        assert present(members)[other] < (2 if other is Role.DECODE else 1)
        return
    rollout = Rollout(steps, known_s=KNOWN_S)
    world.run(rollout)
    assert world.fewest[Role.DECODE] >= min(1, before[Role.DECODE])
    assert world.fewest[to] >= before[to]
    if rollout.state is RolloutState.DONE:
        assert present(world.members)[to] == present(members)[to] + 1
        assert present(world.members)[other] == present(members)[other] - 1


def test_rollout_old_worker_waits_until_routers_reach_new_one():
    members = cluster(routers=2)
    rollout = Rollout(replacement_steps(members, [Role.DECODE]), known_s=KNOWN_S)
    assert [type(order) for order in rollout.advance(members, 0.0)] == [Progress, Add]
    rollout.started("decode-1")
    members["decode-1"] = member(Role.DECODE, 1)
    known = all_connected(members)
    members["router-0"] = known["router-0"]
    assert rollout.advance(members, 1.0) == []
    assert rollout.next_wake() == 1.0 + KNOWN_S
    members["router-1"] = known["router-1"]
    assert Retire(name="decode-0") in rollout.advance(members, 2.0)


def test_rollout_unreachable_process_is_removed_and_the_old_one_stays():
    members = cluster()
    rollout = Rollout(replacement_steps(members, [Role.DECODE]), known_s=KNOWN_S)
    rollout.advance(members, 0.0)
    rollout.started("decode-1")
    members["decode-1"] = member(Role.DECODE, 1)
    assert rollout.advance(members, 0.0) == []
    assert rollout.advance(members, KNOWN_S) == [Retire(name="decode-1")]
    assert rollout.failure == "router-0 cannot reach decode-1 after 5 s"


def test_rollout_new_router_must_reach_its_predecessors_workers():
    far = frozenset({"a:1", "b:2"})
    members = {"router-0": member(Role.ROUTER, 0, reaches=far), "router-1": member(Role.ROUTER, 1)}
    assert missing_contacts("router-1", "router-0", members) == "router-1 cannot reach any worker"
    members["router-1"] = member(Role.ROUTER, 1, reaches=frozenset({"a:1"}))
    assert missing_contacts("router-1", "router-0", members) == "router-1 cannot reach b:2"
    members["router-1"] = member(Role.ROUTER, 1, reaches=far | {"c:3"})
    assert missing_contacts("router-1", "router-0", members) is None


def test_rollout_scale_down_removes_dead_workers_first():
    members = cluster(decode=3)
    members["decode-0"] = replace(members["decode-0"], state=ProcessState.ABANDONED)
    members["decode-1"] = replace(members["decode-1"], state=ProcessState.BACKOFF)
    steps = scale_steps(members, {Role.DECODE: 1})
    assert [step.retire for step in steps] == ["decode-0", "decode-1"]
    assert sizes_of(members)[Role.DECODE] == 2


def test_rollout_scale_to_same_size_replaces_given_up_worker():
    members = cluster(decode=2)
    members["decode-0"] = replace(members["decode-0"], state=ProcessState.ABANDONED)
    steps = scale_steps(members, {Role.DECODE: 2})
    assert [(step.add, step.retire) for step in steps] == [(Role.DECODE, None), (None, "decode-0")]
    with pytest.raises(ChangeRefused, match="no decode worker can be spared"):
        flip_steps(members, Role.PREFILL)


def test_rollout_restarted_worker_gets_full_contact_time():
    rollout = Rollout(scale_steps(cluster(), {Role.DECODE: 2}), known_s=KNOWN_S)
    rollout.advance(cluster(), 0.0)
    rollout.started("decode-1")
    grown = cluster() | {"decode-1": member(Role.DECODE, 1)}
    rollout.advance(grown, 1.0)
    assert rollout.next_wake() == 1.0 + KNOWN_S
    rollout.advance(grown | {"decode-1": member(Role.DECODE, 1, ProcessState.BACKOFF)}, 2.0)
    assert rollout.next_wake() is None
    rollout.advance(grown, 60.0)
    assert rollout.state is RolloutState.UNDER_WAY
    rollout.advance(all_connected(grown), 61.0)
    assert rollout.state is RolloutState.DONE


@pytest.mark.parametrize(
    "steps",
    [lambda them: scale_steps(them, {Role.PREFILL: 2, Role.DECODE: 1}), lambda them: flip_steps(them, Role.PREFILL)],
)
def test_rollout_only_answering_process_stays_until_another_answers(steps):
    """A new worker may take minutes to load: decode-0 was healthy when decode-1 was chosen."""
    members = cluster(decode=2)
    rollout = Rollout(steps(members), known_s=KNOWN_S)
    rollout.advance(members, 0.0)
    rollout.started("prefill-1")
    died = replace(members["decode-0"], state=ProcessState.BACKOFF)
    grown = all_connected(members | {"prefill-1": member(Role.PREFILL, 1), "decode-0": died})
    orders = rollout.advance(grown, 1.0)
    assert orders[-1] == Progress(text="decode-1 stays until decode-0 serves")
    assert rollout.advance(grown, 2.0) == []
    back = grown | {"decode-0": member(Role.DECODE, 0)}
    assert copy(rollout).advance(all_connected(back), 3.0)[-1] == Retire(name="decode-1")
    given_up = grown | {"decode-0": replace(died, state=ProcessState.ABANDONED)}
    assert Retire(name="decode-1") not in rollout.advance(given_up, 3.0)
    assert rollout.failure == "decode-1 is the only decode worker left"


def test_rollout_scale_to_zero_decode_workers_is_refused():
    with pytest.raises(ChangeRefused, match="at least one decode worker"):
        scale_steps(cluster(), {Role.DECODE: 0})
