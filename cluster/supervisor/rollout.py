"""Orders the steps of a change to a running cluster, so that its capacity never falls below what it was.

A change is a sequence of steps; each adds a process, retires one, or does both: then the new one starts first, and the
old one is drained only once the new one serves and every router reaches it. If a new process fails, the change ends and
the old one stays. Where there is no room for both, a step in place retires the old one first, and the others take over
until its replacement serves. Pure: facts come in, orders go out; the clock is an argument.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.supervisor.supervisor import ProcessState, Role

KNOWN_S = 60.0
"""Time for routers to reach a serving worker, and for it to produce a token."""
_COUNT_NOT = (ProcessState.RETIRING, ProcessState.ABANDONED)
"""States of a process that is no longer part of a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Process of the cluster, as it is now."""

    role: Role
    index: int
    state: ProcessState
    address: str = ""
    """Address of a worker."""
    reaches: frozenset[str] | None = None
    """Addresses of the workers that answer this router; None before it has reported them."""

    @property
    def serves(self) -> bool:
        """Whether it serves and is not leaving."""
        return self.state is ProcessState.READY


Members = Mapping[str, Member]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of a change: a process to add, one to retire, or both."""

    add: Role | None = None
    retire: str | None = None
    in_place: bool = False
    """Whether the old process leaves before the new one starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Order to start one more process."""

    role: Role
    index: int
    is_needed: bool = False
    """Whether the process it replaces has left: then the new one is restarted if it dies."""
    replaces: str | None = None
    """Name of the process that it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Order to let a process finish its work and end."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress report for the operator who requested the change."""

    text: str


Order = Add | Retire | Progress


class RolloutState(Enum):
    """State of a change."""

    UNDER_WAY = "in progress"
    DONE = "done"
    FAILED = "failed"


class ChangeRefused(ValueError):
    """The change is invalid, or would leave no process that can serve requests."""


class _Waiting(Enum):
    NOTHING = "nothing"
    ADDED = "added"
    GONE = "gone"


@dataclass(slots=True)
class Rollout:
    """Change of a running cluster, from its first order to its end."""

    steps: Sequence[Step]
    known_s: float = KNOWN_S
    yields: bool = False
    """Whether it yields to a change that an operator requests meanwhile."""
    state: RolloutState = RolloutState.UNDER_WAY
    failure: str | None = None
    _position: int = field(init=False, default=0)
    _waiting: _Waiting = field(init=False, default=_Waiting.NOTHING)
    _added: str | None = field(init=False, default=None)
    _deadline: float | None = field(init=False, default=None)
    """Time by which every router must reach the added process."""
    _aborted: str | None = field(init=False, default=None)
    """Reason why the change must end early."""
    _is_held: bool = field(init=False, default=False)
    """Whether the process to retire stays for now because no other decode worker serves yet."""

    def started(self, name: str) -> None:
        """Record the name of the process added last."""
        self._added = name

    def abandon(self, reason: str) -> None:
        """Fail the change, which cannot continue."""
        if self.state is RolloutState.UNDER_WAY:
            self._fail(reason)

    def abort(self, reason: str) -> None:
        """Abort the change: finished steps stay, and `advance` undoes the present one where it can."""
        if self.state is RolloutState.UNDER_WAY and self._aborted is None:
            self._aborted = reason

    def reports_end(self, name: str) -> bool:
        """Whether this change itself reports that this process has left."""
        if self.state is not RolloutState.UNDER_WAY or self._waiting is not _Waiting.GONE:
            return False
        step = self.steps[self._position]
        return step.retire == name and not step.in_place

    def on_exit(self, name: str, failure: str | None) -> None:
        """Record that a process has left the set; `failure` says why it never served."""
        if self.state is RolloutState.UNDER_WAY and name == self._added and self._waiting is _Waiting.ADDED:
            self._fail(failure or f"{name} has left")

    def next_wake(self) -> float | None:
        """Return when to call `advance` if nothing else happens."""
        return self._deadline

    def advance(self, members: Members, now: float) -> list[Order]:
        """Return the orders that are due. Call this whenever a member has changed, and at `next_wake`."""
        orders: list[Order] = []
        while self.state is RolloutState.UNDER_WAY:
            if self._position == len(self.steps):
                self.state = RolloutState.DONE
                break
            step = self.steps[self._position]
            if self._aborted is not None:
                return orders + self._take_back(step, members, self._aborted)
            made = self._begin(step, members) if self._waiting is _Waiting.NOTHING else self._go_on(step, members, now)
            orders += made
            if not made or isinstance(made[-1], Add):
                break
        return orders

    def _begin(self, step: Step, members: Members) -> list[Order]:
        if step.add is None or step.in_place:
            return self._leave(step, members)
        return self._start(step.add, step, members)

    def _start(self, role: Role, step: Step, members: Members) -> list[Order]:
        self._waiting = _Waiting.ADDED
        instead = f" in place of {step.retire}" if step.retire else ""
        text = f"starting a {role.value} process{instead}"
        index = free_index(members.values(), role)
        return [Progress(text=text), Add(role=role, index=index, is_needed=step.in_place, replaces=step.retire)]

    def _go_on(self, step: Step, members: Members, now: float) -> list[Order]:
        if self._waiting is _Waiting.GONE:
            if step.retire in members:
                return []
            if step.in_place and step.add is not None:
                return self._start(step.add, step, members)
            return self._next(f"{step.retire} has left")
        name = self._added
        added = None if name is None else members.get(name)
        if name is None or added is None:
            return []  # its end is reported through `gone`
        if added.state is ProcessState.ABANDONED:
            return self._give_up(name, step, f"{name} keeps dying")
        if not added.serves:
            self._deadline = None  # it died after it had served: routers get the full time again
            return []
        if missing := missing_contacts(name, step.retire, members):
            if self._deadline is None:
                self._deadline = now + self.known_s
            if now < self._deadline:
                return []
            return self._give_up(name, step, f"{missing} after {self.known_s:g} s")
        self._deadline = None
        serves = Progress(text=f"{name} serves")
        if step.retire is None or step.in_place:
            return [serves, *self._next(None)]
        return self._leave(step, members, serves)

    def _leave(self, step: Step, members: Members, *before: Order) -> list[Order]:
        """Retire the old process, unless no decode worker would be left, since others may have died meanwhile."""
        others = other_decode_workers(step.retire, members)
        if others:
            progress = [] if self._is_held else [Progress(text=f"{step.retire} stays until {others[0]} serves")]
            self._is_held = True
            return [*progress]
        self._is_held = False
        if others is not None and step.add is not Role.DECODE:
            reason = f"{step.retire} is the only decode worker left"
            if self._waiting is _Waiting.ADDED and self._added is not None:
                return self._give_up(self._added, step, reason)
            self._fail(reason)
            return []
        return [*before, *self._retire(step, members)]

    def _retire(self, step: Step, members: Members) -> list[Order]:
        if step.retire is None or step.retire not in members:  # it was given up or forgotten meanwhile
            return self._next(f"{step.retire} no longer exists")
        self._waiting = _Waiting.GONE
        return [Progress(text=f"{step.retire} is draining"), Retire(name=step.retire)]

    def _next(self, progress: str | None) -> list[Order]:
        self._position, self._waiting, self._added = self._position + 1, _Waiting.NOTHING, None
        return [Progress(text=progress)] if progress else [Progress(text=f"{self._position} of {len(self.steps)} done")]

    def _give_up(self, name: str, step: Step, failure: str) -> list[Order]:
        """Remove the added process again, unless the one it replaces has left."""
        self._fail(failure)
        return [] if step.in_place else [Retire(name=name)]

    def _take_back(self, step: Step, members: Members, reason: str) -> list[Order]:
        if self._waiting is _Waiting.GONE and step.in_place:
            if step.retire in members:
                return []  # its retirement cannot be undone
            orders = self._go_on(step, members, now=0.0)  # its replacement is started, but not awaited
            self._fail(reason)
            return orders
        if self._waiting is _Waiting.ADDED and self._added is not None and self._added in members:
            return self._give_up(self._added, step, reason)
        self._fail(reason)
        return []

    def _fail(self, failure: str) -> None:
        self.state, self.failure, self._deadline = RolloutState.FAILED, failure, None


def free_index(members: Iterable[Member], role: Role) -> int:
    """Return the lowest index that no process of this role has."""
    taken = {member.index for member in members if member.role is role}
    return next(index for index in range(len(taken) + 1) if index not in taken)


def other_decode_workers(name: str | None, members: Members) -> list[str] | None:
    """List the decode workers that will serve, if this one is the only one that does now; None if it is not."""
    one = None if name is None else members.get(name)
    if one is None or one.role is not Role.DECODE or not one.serves:
        return None
    others = {n: m for n, m in members.items() if n != name and m.role is one.role and m.state not in _COUNT_NOT}
    return None if any(m.serves for m in others.values()) else list(others)


def missing_contacts(name: str, replaced: str | None, members: Members) -> str | None:
    """Return why this new process, which serves, cannot do its work yet; None if it can.

    Every serving router must reach a worker; a router must reach every serving worker or, where workers run elsewhere,
    all that its predecessor reaches.
    """
    new = members[name]
    routers = {other: member for other, member in members.items() if member.role is Role.ROUTER and member.serves}
    if new.role is not Role.ROUTER:
        if not routers and any(member.role is Role.ROUTER for member in members.values()):
            return "no router serves"
        lacking = [other for other, router in routers.items() if new.address not in (router.reaches or ())]
        return f"{', '.join(lacking)} cannot reach {name}" if lacking else None
    wanted = {member.address for member in members.values() if member.role is not Role.ROUTER and member.serves}
    if not any(member.role is not Role.ROUTER for member in members.values()) and replaced in routers:
        wanted = set(routers[replaced].reaches or ())
    missed = wanted - (new.reaches or frozenset()) if new.reaches is not None else {"any worker"}
    return f"{name} cannot reach {', '.join(sorted(missed))}" if missed else None


def replacement_steps(
    members: Members, roles: Sequence[Role], names: Sequence[str] = (), *, in_place: Container[str] = ()
) -> list[Step]:
    """Restart every process of these roles, then those named, one by one, each after its successor has started unless
    it leaves first. Raises ChangeRefused."""
    staying = {name: member.role for name, member in members.items() if member.state is not ProcessState.RETIRING}
    if unknown := [name for name in names if name not in staying]:
        raise ChangeRefused(f"unknown process {', '.join(unknown)}; the processes are: {', '.join(sorted(staying))}")
    leaving = dict.fromkeys(name for wanted in roles for name, role in staying.items() if role is wanted)
    return [Step(add=staying[name], retire=name, in_place=name in in_place) for name in leaving | dict.fromkeys(names)]


def scale_steps(members: Members, sizes: Mapping[Role, int]) -> list[Step]:
    """Scale each role to its number of workers: first those that grow, then those that shrink, newest workers first."""
    steps: list[Step] = []
    have = sizes_of(members)
    if sizes.get(Role.DECODE, 1) < 1:
        raise ChangeRefused("at least one decode worker must remain: only decode workers answer requests")
    for role, size in sizes.items():
        steps += [Step(add=role)] * (size - have[role])
    for role, size in sizes.items():
        given_up = [name for name, m in members.items() if m.role is role and m.state is ProcessState.ABANDONED]
        steps += [Step(retire=name) for name in given_up + choose_leaving(members, role, have[role] - size)]
    return steps


def flip_steps(members: Members, to: Role) -> list[Step]:
    """Flip one worker of the other pool to this one: the new worker serves before the old one leaves."""
    other = Role.PREFILL if to is Role.DECODE else Role.DECODE
    have = sizes_of(members)[other]
    if have < (2 if other is Role.DECODE else 1):
        raise ChangeRefused(f"no {other.value} worker can be spared")
    (name,) = choose_leaving(members, other, 1)
    return [Step(add=to, retire=name)]


def sizes_of(members: Members) -> Counter[Role]:
    """Count the processes of each role that stay, without abandoned ones."""
    return Counter(member.role for member in members.values() if member.state not in _COUNT_NOT)


def choose_leaving(members: Members, role: Role, count: int) -> list[str]:
    """Return the processes to retire: first those that do not serve, then the newest."""
    found = [(name, m) for name, m in members.items() if m.role is role and m.state not in _COUNT_NOT]
    found.sort(key=lambda one: (one[1].serves, -one[1].index))
    return [name for name, _ in found[: max(0, count)]]
