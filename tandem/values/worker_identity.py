"""The identity of a worker process."""

import secrets
from dataclasses import dataclass

from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Identity of one process, fixed for its lifetime."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    model_name: str
    address: str
    """host:port of its gRPC server."""
    rack: str = ""
    """Part of the network that is fast within itself; "": unknown."""

    @property
    def handoff_address(self) -> str:
        """Address of the hand-off service, which is on the same server."""
        return self.address

    def facts(self) -> dict[str, str]:
        """Facts for the line that announces that the process serves."""
        return {
            "address": self.address,
            "role": self.role.value,
            "worker_id": self.worker_id,
            "incarnation": str(self.incarnation),
            "model": self.model_name,
        }


def draw_incarnation() -> Incarnation:
    """Draw a random incarnation, unique in practice among all processes."""
    return Incarnation(secrets.randbits(63) or 1)
