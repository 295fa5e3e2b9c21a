"""Decides which of a host's GPUs each of its workers computes on, and how many share each. Pure.

GPUs are numbered from 0, as the process that starts the workers sees them. Workers get them in turn, prefill before
decode: the least taken first, then the lowest. `prefill.gpus` and `decode.gpus` say which of them a pool may use.
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
    """Where one worker computes."""

    gpus: tuple[int, ...]
    """One for each of its ranks on this host, in order."""
    sharers: int = 1
    """Workers on the fullest of them, this one included."""


@dataclass(slots=True)
class GpuSpread:
    """Which worker of one host is on which GPUs, by name."""

    _taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For workers that do not run: where they were, or where whom they replace is."""
    _leaving: set[str] = field(default_factory=set)

    def place(self, name: str, allowed: Sequence[int], count: int) -> GpuSeat:
        """`count` of the `allowed` GPUs for this worker: those kept for it, else in turn."""
        self._leaving.discard(name)
        kept = self._taken.pop(name, None) or self._kept.pop(name, None)
        is_good = kept is not None and len(kept) == count and set(kept) <= set(allowed)
        self._taken[name] = kept if kept is not None and is_good else self._in_turn(allowed, count)
        return self.seat(name)

    def replace(self, name: str, retired: str) -> None:
        """The worker that is placed next by this name comes where the other is, or was, which leaves."""
        gpus = self._taken.get(retired) or self._kept.get(retired)
        if gpus is not None:
            self._kept[name] = gpus
            self._leaving.add(retired)

    def seat(self, name: str) -> GpuSeat:
        """Of a worker that was placed, with all that were placed since; those that leave do not count."""
        gpus = self._taken[name]
        return GpuSeat(gpus=gpus, sharers=max(self._load(gpu) for gpu in gpus))

    def leave(self, name: str) -> None:
        """It has ended; should it come again, it is the same GPUs that it gets."""
        self._leaving.discard(name)
        if (gpus := self._taken.pop(name, None)) is not None:
            self._kept[name] = gpus

    def _in_turn(self, allowed: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(sorted(allowed, key=lambda gpu: (self._load(gpu), allowed.index(gpu)))[:count])

    def _load(self, gpu: int) -> int:
        return sum(gpu in gpus for name, gpus in self._taken.items() if name not in self._leaving)


def allowed_gpus(config: ClusterConfig, role: WorkerRole, num_gpus: int) -> tuple[int, ...]:
    """The GPUs of this host that workers of one pool may use, in order.

    Those that its `gpus` names or counts; where it says nothing, all that the other pool does not claim, or simply all.
    Raises ConfigError, naming the setting, for GPUs that are not there, and for fewer than a worker has ranks.
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
    """Where one worker computes when each finds its place by itself, from a configuration that all of them read.

    Workers whose addresses name one host share its GPUs in turn; a worker with a host of its own, and one that Ray
    gave its GPUs, takes the first. Raises ConfigError.
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
    """What the pools' `gpus` says, lists before counts."""
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
    """Every worker whose address is on the host of this one, itself included although its address may not be listed."""
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
