"""Facts about each process of a running cluster: its plan, and its messages and output since it started."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.processes.launcher import Launched
from cluster.supervisor.process_view import ProcessView
from cluster.supervisor.rollout import Member
from cluster.supervisor.supervisor import ProcessPlan, ProcessState, Role
from tandem.process.lifetime import REACHES

LOG_TAIL_LINES = 20


@dataclass(slots=True)
class _Known:
    plan: ProcessPlan
    child: Launched | None = None
    """Child that is running; None while there is none."""
    ready: Mapping[str, Any] | None = None
    """Last ready line of the process."""
    reaches: frozenset[str] | None = None
    """Addresses of the workers that answer a router."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))


class ProcessTable:
    """Holds facts about all processes; their states are the supervisor's. Decides nothing."""

    def __init__(self, plans: Iterable[ProcessPlan], state_of: Callable[[str], ProcessState]) -> None:
        """`plans`: the processes that exist from the start."""
        self._known = {plan.name: _Known(plan) for plan in plans}
        self._state_of = state_of

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def plan(self, name: str) -> ProcessPlan:
        return self._known[name].plan

    def view(self, name: str, *, router_address: str) -> ProcessView:
        """Return the user's view of a process; `router_address` is the one that all routers share."""
        known = self._known[name]
        return ProcessView(
            name=name,
            role=known.plan.role,
            state=self._state_of(name),
            pid=None if known.child is None else known.child.pid,
            address=router_address if known.plan.role is Role.ROUTER else known.plan.address,
            ready=known.ready or {},
        )

    def member(self, name: str) -> Member:
        """Return the process as a member of a rollout."""
        known, plan = self._known[name], self._known[name].plan
        state = self._state_of(name)
        return Member(role=plan.role, index=plan.index, state=state, address=plan.address, reaches=known.reaches)

    def members(self) -> dict[str, Member]:
        return {name: self.member(name) for name in self._known}

    def router_facts(self) -> Mapping[str, Any]:
        """Return the ready line of any router process, as they share their ports; empty before there is one."""
        routers = (known.ready for known in self._known.values() if known.plan.role is Role.ROUTER)
        return next((ready for ready in routers if ready is not None), {})

    def tail(self, name: str) -> tuple[str, ...]:
        """Return the last lines that the process wrote."""
        return tuple(self._known[name].tail) if name in self._known else ()

    def add(self, plan: ProcessPlan) -> None:
        self._known[plan.name] = _Known(plan)

    def forget(self, name: str) -> None:
        """Remove a process from the table."""
        del self._known[name]

    def record_launch(self, name: str) -> None:
        """Record a start or restart: earlier output and contacts belong to another process."""
        known = self._known[name]
        known.tail.clear()
        known.reaches = None

    def record_started(self, name: str, child: Launched) -> None:
        self._known[name].child = child

    def record_ready(self, name: str, info: Mapping[str, Any]) -> None:
        """Record a ready line, which names the address of a worker that a launcher placed."""
        known = self._known[name]
        known.ready = info
        if known.plan.role is not Role.ROUTER and (address := str(info.get("address") or "")):
            known.plan = replace(known.plan, address=address)

    def record_message(self, name: str, news: Mapping[str, Any]) -> bool:
        """Record a message of a serving process; False when it is of no known kind."""
        if not isinstance(reached := news.get(REACHES), list) or name not in self._known:
            return False
        self._known[name].reaches = frozenset(map(str, reached))
        return True

    def record_output(self, name: str, line: str) -> None:
        """Record a line of stdout or stderr."""
        if name in self._known:
            self._known[name].tail.append(line)

    def record_exit(self, name: str) -> None:
        """Record the end of a process."""
        if name in self._known:
            self._known[name].child = None

    def send(self, name: str, signum: signal.Signals) -> None:
        """Signal a process. Raises KeyError if it does not exist or is not running."""
        if (child := self._known[name].child) is None:
            raise KeyError(name)
        child.send(signum)

    def is_alive(self, name: str) -> bool:
        """Return whether the process can be signalled."""
        return name in self._known and self._known[name].child is not None
