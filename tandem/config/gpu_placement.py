"""Assigns a host's GPUs to its workers, and counts how many workers share each. Pure.

GPUs are numbered from 0, as seen by the process that starts the workers. Workers get them in turn, prefill before
decode: the least used first, then the lowest. `prefill.gpus` and `decode.gpus` restrict which of them a pool may use.
Workers on one GPU divide its memory evenly; ranks of one worker are never on the same one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.config.cluster import ClusterConfig
from tandem.config.pools import PoolConfig, has_own_host
from tandem.errors import ConfigError
from tandem.rpc.hosts import split
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeat:
    """The GPUs of one worker."""

    gpus: tuple[int, ...]
    """One GPU for each of the worker's ranks on this host, in order."""
    sharers: int = 1
    """Number of workers on the most shared of them, this one included."""


@dataclass(slots=True)
class GpuSpread:
    """Assignment of one host's GPUs to workers, by name."""

    _taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs of workers that do not run: where each was, or where the worker is that it replaces."""
    _leaving: set[str] = field(default_factory=set)

    def place(self, name: str, allowed: Sequence[int], count: int) -> GpuSeat:
        """Assign `count` of the `allowed` GPUs to a worker: those kept for it, otherwise in turn."""
        self._leaving.discard(name)
        kept = self._taken.pop(name, None) or self._kept.pop(name, None)
        is_good = kept is not None and len(kept) == count and set(kept) <= set(allowed)
        self._taken[name] = kept if kept is not None and is_good else self._in_turn(allowed, count)
        return self.seat(name)

    def replace(self, name: str, retired: str) -> None:
        """Have the next worker of this `name` take the GPUs of the worker `retired`, which no longer counts there."""
        gpus = self._taken.get(retired) or self._kept.get(retired)
        if gpus is not None:
            self._kept[name] = gpus
            self._leaving.add(retired)

    def seat(self, name: str) -> GpuSeat:
        """The seat of a placed worker, counting all placed since; workers that are leaving do not count."""
        gpus = self._taken[name]
        return GpuSeat(gpus=gpus, sharers=max(self._load(gpu) for gpu in gpus))

    def leave(self, name: str) -> None:
        """Record that a worker has ended; its GPUs are kept for its return."""
        self._leaving.discard(name)
        if (gpus := self._taken.pop(name, None)) is not None:
            self._kept[name] = gpus

    def _in_turn(self, allowed: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(sorted(allowed, key=lambda gpu: (self._load(gpu), allowed.index(gpu)))[:count])

    def _load(self, gpu: int) -> int:
        return sum(gpu in gpus for name, gpus in self._taken.items() if name not in self._leaving)


def allowed_gpus(config: ClusterConfig, role: WorkerRole, num_gpus: int) -> tuple[int, ...]:
    """The GPUs of this host that workers of one pool may use, in order.

    Those that its `gpus` names or counts; if unset, all that the other pool does not claim, or simply all. Raises
    ConfigError, naming the setting, for GPUs that do not exist, and for fewer than a worker has ranks.
    """
    pools = {WorkerRole.PREFILL: config.prefill, WorkerRole.DECODE: config.decode}
    if has_own_host(pools[role]):
        pools = {role: pools[role]}
    claims = _claims(pools, num_gpus)
    allowed = claims.get(role)
    if allowed is None:
        claimed = {gpu for gpus in claims.values() for gpu in gpus}
        allowed = tuple(gpu for gpu in range(num_gpus) if gpu not in claimed) or tuple(range(num_gpus))
    if (ranks := pools[role].ranks_per_node) > len(allowed):
        which = ", ".join(map(str, allowed)) or "none"
        raise ConfigError(
            f"{role.value}.tensor_parallel_size is {pools[role].tensor_parallel_size}: each of the {ranks} ranks here "
            f"needs a GPU of its own, and the pool has {len(allowed)} (GPUs {which}) of the {num_gpus} that are visible"
        )
    return allowed


def static_seat(config: ClusterConfig, role: WorkerRole, index: int, num_gpus: int) -> GpuSeat:
    """The GPUs of one worker, computed by each worker itself from the common configuration.

    Workers whose addresses name one host share its GPUs in turn; a worker with a host of its own, and one that Ray gave
    its GPUs, takes the first. Raises ConfigError.
    """
    pool = config.prefill if role is WorkerRole.PREFILL else config.decode
    allowed = allowed_gpus(config, role, num_gpus)
    if has_own_host(pool) or not pool.addresses:
        return GpuSeat(gpus=allowed[: pool.ranks_per_node])
    spread = GpuSpread()
    for one, number in _on_host(config, role, index):
        beside = config.prefill if one is WorkerRole.PREFILL else config.decode
        spread.place(f"{one.value}-{number}", allowed_gpus(config, one, num_gpus), beside.ranks_per_node)
    return spread.seat(f"{role.value}-{index}")


def _claims(pools: dict[WorkerRole, PoolConfig], num_gpus: int) -> dict[WorkerRole, tuple[int, ...]]:
    """The GPUs that the pools' `gpus` claims, lists before counts."""
    found: dict[WorkerRole, tuple[int, ...]] = {}
    for role, pool in pools.items():
        if isinstance(pool.gpus, tuple):
            if missing := [gpu for gpu in pool.gpus if gpu >= num_gpus]:
                last = f"the last visible one is GPU {num_gpus - 1}" if num_gpus else "none is visible"
                raise ConfigError(f"{role.value}.gpus names GPU {missing[0]}: {last}")
            found[role] = pool.gpus
    for role, pool in pools.items():
        if isinstance(pool.gpus, int):
            claimed = {gpu for gpus in found.values() for gpu in gpus}
            free = [gpu for gpu in range(num_gpus) if gpu not in claimed]
            if len(free) < pool.gpus:
                raise ConfigError(
                    f"{role.value}.gpus is {pool.gpus}: {num_gpus} are visible, of which the other pool claims "
                    f"{len(claimed)}"
                )
            found[role] = tuple(free[: pool.gpus])
    return found


def _on_host(config: ClusterConfig, role: WorkerRole, index: int) -> Iterator[tuple[WorkerRole, int]]:
    """Yield all workers on the host of this one, itself included although its address may not be listed."""
    pools = {WorkerRole.PREFILL: config.prefill, WorkerRole.DECODE: config.decode}
    own = pools[role].addresses
    here = _host(own[index] if index < len(own) else own[0])
    for one, pool in pools.items():
        listed = [number for number, address in enumerate(pool.addresses) if _host(address) == here]
        for number in [*listed, *([index] if one is role and index not in listed else [])]:
            yield one, number


def _host(address: str) -> str:
    host = split(address)[0]
    return "localhost" if host in ("localhost", "::1") or host.startswith("127.") else host
