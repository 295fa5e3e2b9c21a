"""Who a worker process is."""

import secrets
from dataclasses import dataclass

from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Fixed for the life of one process."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    model_name: str
    address: str
    """host:port of its gRPC server."""
    rack: str = ""
    """Part of the network that is fast within itself; empty: unknown."""

    @property
    def handoff_address(self) -> str:
        """Hand-offs are served on the same server: prompts by prefill workers, prefixes by all."""
        return self.address

    def facts(self) -> dict[str, str]:
        """For the line that says that the process serves."""
        return {
            "address": self.address,
            "role": self.role.value,
            "worker_id": self.worker_id,
            "incarnation": str(self.incarnation),
            "model": self.model_name,
        }


def draw_incarnation() -> Incarnation:
    """A number that no earlier or other process has."""
    return Incarnation(secrets.randbits(63) or 1)
