"""Changes that can be requested of a running cluster, as steps on its set of processes."""

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.control.gpu_room import workers_without_room
from cluster.control.wire import FlipRequest, RestartRequest, ScaleRequest
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ChangeFailed
from cluster.supervisor.rollout import (
    ChangeRefused,
    Members,
    Rollout,
    Step,
    flip_steps,
    replacement_steps,
    scale_steps,
    sizes_of,
)
from cluster.supervisor.supervisor import ProcessState, Role
from tandem.config.pools import health_port_problem, health_ports_problem

Change = ScaleRequest | FlipRequest | RestartRequest
_WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """Steps of a change, and the sizes of both pools after it."""

    steps: list[Step]
    sizes: Mapping[Role, int]


def plan_change(
    request: Change,
    members: Members,
    *,
    routers_only: bool = False,
    workers_without_room: Container[str] = (),
    over_nodes: Container[Role] = (),
) -> PlannedChange:
    """Return the steps of the requested change. Raises ChangeRefused.

    `workers_without_room`: workers whose GPUs cannot hold a second one. `over_nodes`: pools whose workers have ranks on
    other nodes; those follow the worker of one index, so its replacement must have the same index.
    """
    have = {role: sizes_of(members)[role] for role in _WORKERS}
    if routers_only and not isinstance(request, RestartRequest):
        raise ChangeRefused("this supervisor runs routers only; its workers are started elsewhere")
    if isinstance(request, ScaleRequest):
        named = {Role.PREFILL: request.prefill, Role.DECODE: request.decode}
        changed = {role: size for role, size in named.items() if size is not None}
        return PlannedChange(steps=scale_steps(members, changed), sizes=have | changed)
    if isinstance(request, FlipRequest):
        if any(role in over_nodes for role in _WORKERS):
            raise ChangeRefused("workers with ranks on other nodes cannot change pools: scale both pools instead")
        to = Role(request.to)
        sizes = {role: size + (1 if role is to else -1) for role, size in have.items()}
        return PlannedChange(steps=flip_steps(members, to), sizes=sizes)
    workers = {name for name, member in members.items() if member.role is not Role.ROUTER}
    full = {name for name in workers if name in workers_without_room or members[name].role in over_nodes}
    first = workers if request.in_place else full
    names = request.names or ()
    roles = [Role(name) for name in request.roles] or ([] if names else [*_WORKERS, Role.ROUTER])
    steps = replacement_steps(members, roles, names, in_place=first)
    given_up = (members[step.retire] for step in steps if step.retire is not None)
    back = Counter(member.role for member in given_up if member.state is ProcessState.ABANDONED)
    sizes = {role: size + back[role] for role, size in have.items()}
    if not request.in_place and (alone := _answers_alone(steps, members)):
        raise ChangeRefused(
            f"there is no room for a replacement while {alone} runs, and no other decode worker serves: "
            "`tandem restart --in-place` replaces it with an interruption"
        )
    return PlannedChange(steps=steps, sizes=sizes)


def _answers_alone(steps: Sequence[Step], members: Members) -> str | None:
    """Return the only serving decode worker, if it would stop before its replacement starts."""
    serving = [name for name, member in members.items() if member.role is Role.DECODE and member.serves]
    return next((step.retire for step in steps if step.in_place and [step.retire] == serving), None)


async def carry_out(cluster: LocalCluster, request: Change, report: Callable[[str], None]) -> None:
    """Carry out a change to its end. Raises ChangeRefused before anything has changed, and ChangeFailed.

    A planner's change in progress is aborted in favour of an operator's.
    """
    full = await _workers_without_room(cluster, request)
    spread = _over_nodes(cluster)
    plan_now = partial(
        plan_change, request, routers_only=cluster.routers_only, workers_without_room=full, over_nodes=spread
    )
    # An invalid request must not abort the change in progress.
    _check_health_ports(cluster, plan_now(cluster.members()).sizes)
    yields = not isinstance(request, RestartRequest) and bool(request.yields)
    if cluster.under_way is not None and cluster.under_way.yields and not yields:
        report("aborting the planner's change in progress")
        await cluster.abort("replaced by an operator's change")
    if cluster.under_way is not None:
        raise ChangeRefused("another change is in progress: `tandem abort` aborts it")
    members = cluster.members()
    plan = plan_now(members)
    _announce(plan, members, report, why=_why_in_place(request, spread))
    if not cluster.routers_only:
        cluster.shared.resize(plan.sizes)
    try:
        await cluster.change(Rollout(plan.steps, yields=yields), report)
    except ChangeFailed:
        if not cluster.routers_only and cluster.under_way is None:  # otherwise the newer change has set its own sizes
            with contextlib.suppress(ChangeFailed):  # the first failure is the one to report
                cluster.shared.resize({role: sizes_of(cluster.members())[role] for role in _WORKERS})
        raise


def _check_health_ports(cluster: LocalCluster, sizes: Mapping[Role, int]) -> None:
    """Refuse sizes with which two workers here would serve their health at one port. Raises ChangeRefused."""
    if not cluster.runs_here:
        return
    pools = {
        role.value: pool.model_copy(update={"addresses": (), "port": 0, "replicas": sizes[role]})
        for role, pool in ((Role.PREFILL, cluster.config.prefill), (Role.DECODE, cluster.config.decode))
    }
    for name, pool in pools.items():
        if reason := health_port_problem(pool):
            raise ChangeRefused(f"{name}.{reason}")
    if reason := health_ports_problem(pools):
        raise ChangeRefused(reason)


async def _workers_without_room(cluster: LocalCluster, request: Change) -> frozenset[str]:
    """Return the local workers whose replacement has room only after they have ended."""
    if not isinstance(request, RestartRequest) or request.in_place or not cluster.runs_here:
        return frozenset()
    return await workers_without_room(cluster.workers, cluster.config)


def _over_nodes(cluster: LocalCluster) -> frozenset[Role]:
    pools = {Role.PREFILL: cluster.config.prefill, Role.DECODE: cluster.config.decode}
    return frozenset(role for role, pool in pools.items() if pool.nodes > 1)


def _why_in_place(request: Change, over_nodes: Container[Role]) -> str:
    if isinstance(request, RestartRequest) and request.in_place:
        return "as requested"
    if any(role in over_nodes for role in _WORKERS):
        return "because ranks on other nodes follow one worker at a time, or the GPUs have no room for both"
    return "because the GPUs have no room for both"


def _announce(plan: PlannedChange, members: Members, report: Callable[[str], None], *, why: str) -> None:
    """Report the workers that stop before their replacement starts, and the consequences."""
    first = sorted(step.retire for step in plan.steps if step.in_place and step.retire)
    if first:
        report(f"replaced in place, {why}: {', '.join(first)}; the other workers take over meanwhile")
    if alone := _answers_alone(plan.steps, members):
        report(f"{alone} is the only decode worker: streams and new requests wait until its replacement serves")


async def abort(cluster: LocalCluster) -> None:
    """Abort the change in progress and wait for its end. Raises ChangeRefused if there is none."""
    if cluster.under_way is None:
        raise ChangeRefused("no change is in progress")
    await cluster.abort("it was aborted")
