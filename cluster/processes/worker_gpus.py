"""Which GPUs of this machine `tandem up` gives to each of its workers, and what it tells them of that."""

from collections.abc import Sequence

from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import ClusterConfig
from tandem.config.gpu_placement import GpuSeat, GpuSpread, allowed_gpus
from tandem.errors import ConfigError
from tandem.process.gpu_host import GpuHost
from tandem.values.roles import WorkerRole


class WorkerGpus:
    """Kept as long as the cluster lives: a worker that comes again, or in another's place, has the same GPUs."""

    def __init__(self, host: GpuHost) -> None:
        self._host = host
        self._spread = GpuSpread()
        self._count: int | None = None

    @property
    def _num_gpus(self) -> int:
        """Asked once: a driver that nobody uses takes a second to answer."""
        if self._count is None:
            self._count = len(self._host.names())
        return self._count

    def plan(self, config: ClusterConfig, plans: Sequence[ProcessPlan]) -> None:
        """These start together: each is to know how many share its GPUs before the last of them is there."""
        self._spread = GpuSpread()
        for plan in plans:
            self._place(config, plan)

    def arguments(self, config: ClusterConfig, plan: ProcessPlan) -> list[str]:
        """For the command line of a worker that starts now; nothing where there are no GPUs to be had.

        What cannot be had the worker says itself, in the words of whoever is started by hand.
        """
        seat = self._place(config, plan)
        if seat is None:
            return []
        return ["--gpus", ",".join(map(str, seat.gpus)), "--gpu-sharers", str(seat.sharers)]

    def seats(self, config: ClusterConfig, plans: Sequence[ProcessPlan]) -> dict[str, GpuSeat]:
        """Of these workers, as `plan` has placed them. Raises ConfigError for GPUs that cannot be had."""
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
