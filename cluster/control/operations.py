"""What may be asked of a running cluster, as changes of its set of processes."""

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.control.gpu_room import crowded
from cluster.control.wire import FlipAsked, RestartAsked, ScaleAsked
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ChangeFailed
from cluster.supervisor.rollout import (
    ChangeRefused,
    Members,
    Rollout,
    Step,
    flip_steps,
    restart_steps,
    scale_steps,
    sizes_of,
)
from cluster.supervisor.supervisor import ProcessState, Role

Change = ScaleAsked | FlipAsked | RestartAsked
_WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A change and the sizes of both pools behind it."""

    steps: list[Step]
    sizes: Mapping[Role, int]


def planned(
    asked: Change,
    members: Members,
    *,
    routers_only: bool = False,
    crowded: Container[str] = (),
    over_nodes: Container[Role] = (),
) -> Planned:
    """What is to be done. Raises ChangeRefused.

    `crowded`: workers beside which no other has room. `over_nodes`: pools whose workers have ranks on other nodes;
    those follow the worker of one index, so its successor must have the same.
    """
    have = {role: sizes_of(members)[role] for role in _WORKERS}
    if routers_only and not isinstance(asked, RestartAsked):
        raise ChangeRefused("the workers are not started from here")
    if isinstance(asked, ScaleAsked):
        named = {Role.PREFILL: asked.prefill, Role.DECODE: asked.decode}
        changed = {role: size for role, size in named.items() if size is not None}
        return Planned(steps=scale_steps(members, changed), sizes=have | changed)
    if isinstance(asked, FlipAsked):
        if any(role in over_nodes for role in _WORKERS):
            raise ChangeRefused("ranks on other nodes follow workers of their own pool: scale both pools instead")
        to = Role(asked.to)
        sizes = {role: size + (1 if role is to else -1) for role, size in have.items()}
        return Planned(steps=flip_steps(members, to), sizes=sizes)
    workers = {name for name, member in members.items() if member.role is not Role.ROUTER}
    full = {name for name in workers if name in crowded or members[name].role in over_nodes}
    first = workers if asked.in_place else full
    names = asked.names or ()
    roles = [Role(name) for name in asked.roles] or ([] if names else [*_WORKERS, Role.ROUTER])
    steps = restart_steps(members, roles, names, in_place=first)
    given_up = (members[step.retire] for step in steps if step.retire is not None)
    back = Counter(member.role for member in given_up if member.state is ProcessState.ABANDONED)
    sizes = {role: size + back[role] for role, size in have.items()}
    if not asked.in_place and (alone := _answers_alone(steps, members)):
        raise ChangeRefused(
            f"its GPU or its nodes have no room for another worker beside {alone}, and no other one answers: "
            "`tandem restart --in-place` replaces it with a pause"
        )
    return Planned(steps=steps, sizes=sizes)


def _answers_alone(steps: Sequence[Step], members: Members) -> str | None:
    """The decode worker that would leave with none beside it, before its successor starts."""
    serving = [name for name, member in members.items() if member.role is Role.DECODE and member.serves]
    return next((step.retire for step in steps if step.in_place and [step.retire] == serving), None)


async def carry_out(cluster: LocalCluster, asked: Change, tell: Callable[[str], None]) -> None:
    """Do it, to the end. Raises ChangeRefused before anything has changed, and ChangeFailed.

    A planner's change that is under way makes room for an operator's.
    """
    full = await _crowded(cluster, asked)
    spread = _over_nodes(cluster)
    plan_now = partial(planned, asked, routers_only=cluster.routers_only, crowded=full, over_nodes=spread)
    plan_now(cluster.members())  # nonsense displaces nobody
    yields = not isinstance(asked, RestartAsked) and bool(asked.yields)
    if cluster.under_way is not None and cluster.under_way.yields and not yields:
        tell("a planner's change is under way: it is taken back")
        await cluster.abort("an operator's change takes its place")
    if cluster.under_way is not None:
        raise ChangeRefused("another change is under way: `tandem abort` takes it back")
    members = cluster.members()
    plan = plan_now(members)
    _announce(plan, members, tell, why=_why_in_place(asked, spread))
    if not cluster.routers_only:
        cluster.shared.resize(plan.sizes)
    try:
        await cluster.change(Rollout(plan.steps, yields=yields), tell)
    except ChangeFailed:
        if not cluster.routers_only and cluster.under_way is None:  # another one may have its own sizes by now
            with contextlib.suppress(ChangeFailed):  # the first reason is the one to tell
                cluster.shared.resize({role: sizes_of(cluster.members())[role] for role in _WORKERS})
        raise


async def _crowded(cluster: LocalCluster, asked: Change) -> frozenset[str]:
    """Workers of this machine whose successors have room only when they have left."""
    if not isinstance(asked, RestartAsked) or asked.in_place or not cluster.runs_here:
        return frozenset()
    return await crowded(cluster.workers, cluster.config)


def _over_nodes(cluster: LocalCluster) -> frozenset[Role]:
    pools = {Role.PREFILL: cluster.config.prefill, Role.DECODE: cluster.config.decode}
    return frozenset(role for role, pool in pools.items() if pool.nodes > 1)


def _why_in_place(asked: Change, over_nodes: Container[Role]) -> str:
    if isinstance(asked, RestartAsked) and asked.in_place:
        return "as was asked"
    if any(role in over_nodes for role in _WORKERS):
        return "since ranks on other nodes follow one worker at a time, or GPUs have no room for both"
    return "since their GPUs have no room for both"


def _announce(plan: Planned, members: Members, tell: Callable[[str], None], *, why: str) -> None:
    """Who leaves before its successor starts, and what that means."""
    first = sorted(step.retire for step in plan.steps if step.in_place and step.retire)
    if first:
        tell(f"in place, {why}: {', '.join(first)}; the others do their work meanwhile")
    if alone := _answers_alone(plan.steps, members):
        tell(f"{alone} is the only decode worker: until its successor serves streams wait, and what is new as well")


async def abort(cluster: LocalCluster) -> None:
    """Take the change that is under way back, and wait for its end. Raises ChangeRefused when there is none."""
    if cluster.under_way is None:
        raise ChangeRefused("no change is under way")
    await cluster.abort("it was taken back")
