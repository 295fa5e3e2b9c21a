"""Decides which worker runs on which node of a Ray cluster, with which resources and configuration.

Pure: nodes as Ray reports them come in, a node and resources go out; the clock is an argument. A worker with all its
tensor-parallel ranks is one placement group of one bundle, so it is always on one node (the group is STRICT_PACK).
Workers of a pool are spread, so that the loss of a node affects as few of each pool as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.supervisor.supervisor import Role
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.config.pools import MAX_REPLICAS, PoolConfig
from tandem.config.prices import PriceConfig
from tandem.config.ray import RayConfig, RayPoolConfig

STRATEGY = "STRICT_PACK"
CPU, GPU, MEMORY = "CPU", "GPU", "memory"
SHUN_S = 60.0
"""Time for which a node that lost a worker gets another only if no other node has room."""
_EPSILON = 1e-6

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node that is alive, as Ray reports it."""

    node_id: str
    host: str
    total: Resources
    free: Resources

    def could_hold(self, bundle: Resources) -> bool:
        """Return whether the node has enough resources in total."""
        return _fits(bundle, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    role: Role
    node_id: str
    bundle: Resources


def pool_of(config: ClusterConfig, role: Role) -> PoolConfig:
    """Return the configuration section of a worker's pool."""
    return config.prefill if role is Role.PREFILL else config.decode


def bundle_of(config: ClusterConfig, role: Role, *, has_gpus: bool) -> dict[str, float]:
    """Return the resources of one worker. `has_gpus`: of the Ray cluster; `engine.device: auto` then uses them."""
    ranks = pool_of(config, role).tensor_parallel_size
    wanted = _wanted(config.ray, role)
    bundle = {CPU: wanted.cpus or float((config.engine.num_threads or 1) * ranks)}
    if config.engine.device == "cuda" or (config.engine.device == "auto" and has_gpus):
        bundle[GPU] = float(ranks)
    return bundle | dict(wanted.resources)


def worker_config(config: ClusterConfig, role: Role, node: Node, model_path: str) -> ClusterConfig:
    """Return the configuration of a worker on this node, without what only routers need, such as API keys.

    On CPUs, a worker divides threads and memory by the resources that Ray assigns to it, as it cannot know which
    workers will join it: the pools' sizes are then the number of such workers that the node could hold.
    """
    bundle = bundle_of(config, role, has_gpus=GPU in node.total)
    engine = config.engine
    if GPU not in bundle:
        threads = engine.num_threads or max(1, int(bundle[CPU] // pool_of(config, role).tensor_parallel_size))
        stated = bundle.get(MEMORY)
        memory_bytes = engine.memory_bytes or (None if stated is None else int(stated))
        engine = engine.model_copy(update={"num_threads": threads, "memory_bytes": memory_bytes})
    alike = max(1, int(node.total.get(CPU, 0.0) / bundle[CPU] + _EPSILON))
    replicas = {Role.PREFILL: (alike, 1), Role.DECODE: (0, alike)}[role]  # there is always a decode worker
    return config.model_copy(
        update={
            "engine": engine,
            "model": config.model.model_copy(update={"path": model_path}),
            "prefill": config.prefill.model_copy(update={"addresses": (), "replicas": min(replicas[0], MAX_REPLICAS)}),
            "decode": config.decode.model_copy(update={"addresses": (), "replicas": min(replicas[1], MAX_REPLICAS)}),
            "router": RouterConfig(takeover_s=config.router.takeover_s),
            "prices": PriceConfig(),
        }
    )


def _wanted(config: RayConfig, role: Role) -> RayPoolConfig:
    return config.prefill if role is Role.PREFILL else config.decode


@dataclass(slots=True)
class RayPlacement:
    """Records which of our workers runs on which node, by name, and chooses the node of the next one."""

    _homes: dict[str, _Home] = field(default_factory=dict)
    _shunned: dict[str, float] = field(default_factory=dict)
    """Times until which nodes are avoided, by node id."""

    def choose(self, name: str, role: Role, bundle: Resources, nodes: Sequence[Node], now: float) -> Node | None:
        """Choose a node for this worker and reserve it; None if no node has room: then Ray waits for one.

        Nodes with the fewest workers of the same pool come first, then the fewest workers of ours, then the most free
        processors.
        """
        self.leave(name)
        self._shunned = {node_id: until for node_id, until in self._shunned.items() if until > now}
        fit = [node for node in nodes if _fits(bundle, self._left(node))]
        if not fit:
            return None
        best = min(fit, key=self._rank(role))
        self.settle(name, role, bundle, best.node_id)
        return best

    def settle(self, name: str, role: Role, bundle: Resources, node_id: str) -> None:
        """Record where the actor runs, as Ray may have chosen another node."""
        self._homes[name] = _Home(role=role, node_id=node_id, bundle=bundle)

    def leave(self, name: str) -> None:
        self._homes.pop(name, None)

    def lost(self, name: str, now: float) -> None:
        """Record the loss of an actor with its node, which is avoided for a while."""
        if (home := self._homes.pop(name, None)) is not None:
            self._shunned[home.node_id] = now + SHUN_S

    def _rank(self, role: Role) -> "_Ranking":
        return _Ranking(homes=tuple(self._homes.values()), shunned=frozenset(self._shunned), role=role)

    def _left(self, node: Node) -> dict[str, float]:
        """Return the free resources without what was just taken, as Ray's own count lags behind."""
        ours: dict[str, float] = {}
        for home in self._homes.values():
            if home.node_id == node.node_id:
                for resource, amount in home.bundle.items():
                    ours[resource] = ours.get(resource, 0.0) + amount
        return {
            resource: min(node.free.get(resource, 0.0), total - ours.get(resource, 0.0))
            for resource, total in node.total.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """Sort key of nodes, the best first."""

    homes: tuple[_Home, ...]
    shunned: frozenset[str]
    role: Role

    def __call__(self, node: Node) -> tuple[bool, int, int, float, str]:
        here = [home for home in self.homes if home.node_id == node.node_id]
        alike = sum(home.role is self.role for home in here)
        return node.node_id in self.shunned, alike, len(here), -node.free.get(CPU, 0.0), node.node_id


def _fits(bundle: Resources, room: Resources) -> bool:
    return all(room.get(resource, 0.0) + _EPSILON >= amount for resource, amount in bundle.items())


def render_resources(resources: Resources) -> str:
    """Render resources in words: `2 CPU, 1 GPU`."""
    return ", ".join(f"{_amount(name, amount)}" for name, amount in sorted(resources.items()))


def _amount(name: str, amount: float) -> str:
    return f"{amount / (1 << 30):.1f} GiB memory" if name == MEMORY else f"{amount:g} {name}"
