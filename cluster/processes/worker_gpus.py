"""Passes each worker of `tandem up` the GPUs that `tandem.config.gpu_placement` chose, on the command line."""

from collections.abc import Sequence

from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import ClusterConfig
from tandem.config.gpu_placement import GpuSeat, GpuSpread, allowed_gpus
from tandem.errors import ConfigError
from tandem.process.gpu_host import GpuHost
from tandem.values.roles import WorkerRole


class WorkerGpus:
    """Keeps the assignments for the cluster's life: a restarted worker, or its replacement, gets the same GPUs."""

    def __init__(self, host: GpuHost) -> None:
        self._host = host
        self._spread = GpuSpread()
        self._count: int | None = None

    @property
    def _num_gpus(self) -> int:
        """Number of GPUs, queried once: an idle driver takes a second to answer."""
        if self._count is None:
            self._count = len(self._host.names())
        return self._count

    def plan(self, config: ClusterConfig, plans: Sequence[ProcessPlan]) -> None:
        """Place workers that start together, so that each knows from the start how many share its GPUs."""
        self._spread = GpuSpread()
        for plan in plans:
            self._place(config, plan)

    def arguments(self, config: ClusterConfig, plan: ProcessPlan) -> list[str]:
        """Return the arguments for a worker that starts now; none where there are no GPUs.

        The worker itself reports GPUs that are unavailable, like one that was started by hand.
        """
        seat = self._place(config, plan)
        if seat is None:
            return []
        return ["--gpus", ",".join(map(str, seat.gpus)), "--gpu-sharers", str(seat.sharers)]

    def seats(self, config: ClusterConfig, plans: Sequence[ProcessPlan]) -> dict[str, GpuSeat]:
        """Return the placement of these workers by `plan`. Raises ConfigError for unavailable GPUs."""
        for role in WorkerRole:
            allowed_gpus(config, role, self._num_gpus)
        self.plan(config, plans)
        return {plan.name: self._spread.seat(plan.name) for plan in plans if plan.role is not Role.ROUTER}

    def replace(self, name: str, retired: str) -> None:
        self._spread.replace(name, retired)

    def leave(self, name: str) -> None:
        self._spread.leave(name)

    def _place(self, config: ClusterConfig, plan: ProcessPlan) -> GpuSeat | None:
        if plan.role is Role.ROUTER or config.engine.device == "cpu":
            return None
        if not self._num_gpus:
            return None
        role = WorkerRole.PREFILL if plan.role is Role.PREFILL else WorkerRole.DECODE
        pool = config.prefill if role is WorkerRole.PREFILL else config.decode
        try:
            allowed = allowed_gpus(config, role, self._num_gpus)
        except ConfigError:
            return None
        return self._spread.place(plan.name, allowed, pool.ranks_per_node)
