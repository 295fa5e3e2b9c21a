"""What may be asked of a running cluster, as changes of its set of processes."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.control_wire import FlipAsked, RestartAsked, ScaleAsked
from cluster.endings import ChangeFailed
from cluster.local import LocalCluster
from cluster.rollout import ChangeRefused, Members, Rollout, Step, flip_steps, restart_steps, scale_steps, sizes_of
from cluster.supervisor import ProcessState, Role

Change = ScaleAsked | FlipAsked | RestartAsked
_WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A change and the sizes of both pools behind it."""

    steps: list[Step]
    sizes: Mapping[Role, int]


def planned(asked: Change, members: Members, *, routers_only: bool = False) -> Planned:
    """What is to be done. Raises ChangeRefused."""
    have = {role: sizes_of(members)[role] for role in _WORKERS}
    if routers_only and not isinstance(asked, RestartAsked):
        raise ChangeRefused("the workers are not started from here")
    if isinstance(asked, ScaleAsked):
        named = {Role.PREFILL: asked.prefill, Role.DECODE: asked.decode}
        changed = {role: size for role, size in named.items() if size is not None}
        return Planned(steps=scale_steps(members, changed), sizes=have | changed)
    if isinstance(asked, FlipAsked):
        to = Role(asked.to)
        sizes = {role: size + (1 if role is to else -1) for role, size in have.items()}
        return Planned(steps=flip_steps(members, to), sizes=sizes)
    roles = [Role(name) for name in asked.roles] or [*_WORKERS, Role.ROUTER]
    back = Counter(member.role for member in members.values() if member.state is ProcessState.ABANDONED)
    sizes = {role: size + (back[role] if role in roles else 0) for role, size in have.items()}
    return Planned(steps=restart_steps(members, list(dict.fromkeys(roles))), sizes=sizes)


async def carry_out(cluster: LocalCluster, asked: Change, tell: Callable[[str], None]) -> None:
    """Do it, to the end. Raises ChangeRefused before anything has changed, and ChangeFailed.

    A planner's change that is under way makes room for an operator's.
    """
    yields = not isinstance(asked, RestartAsked) and asked.yields
    if cluster.under_way is not None and cluster.under_way.yields and not yields:
        tell("a planner's change is under way: it is taken back")
        await cluster.abort("an operator's change takes its place")
    if cluster.under_way is not None:
        raise ChangeRefused("another change is under way: `tandem abort` takes it back")
    plan = planned(asked, cluster.members(), routers_only=cluster.routers_only)
    if not cluster.routers_only:
        cluster.resize(plan.sizes)
    try:
        await cluster.change(Rollout(plan.steps, yields=yields), tell)
    except ChangeFailed:
        if not cluster.routers_only and cluster.under_way is None:  # another one may have its own sizes by now
            with contextlib.suppress(ChangeFailed):  # the first reason is the one to tell
                cluster.resize({role: sizes_of(cluster.members())[role] for role in _WORKERS})
        raise


async def abort(cluster: LocalCluster) -> None:
    """Take the change that is under way back, and wait for its end. Raises ChangeRefused when there is none."""
    if cluster.under_way is None:
        raise ChangeRefused("no change is under way")
    await cluster.abort("it was taken back")
