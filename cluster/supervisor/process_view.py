"""What a user is shown of a cluster's processes, and whoever shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.supervisor.supervisor import Note, ProcessState, Role
from tandem.process.load_progress import LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """What is known of one process now."""

    name: str
    role: Role
    state: ProcessState
    pid: int | None
    address: str
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Its last ready line: worker_id, num_blocks, block_size, kv_bytes, weights_bytes, model, load_s, …"""

    @property
    def worker_id(self) -> str:
        """The id that the worker gave itself; its name before it did."""
        return str(self.ready.get("worker_id", self.name))


class Watcher(Protocol):
    """Whoever shows the user what happens. Called on the event loop; must not raise."""

    def on_state(self, view: ProcessView) -> None:
        """A process has moved on."""

    def on_loading(self, name: str, report: LoadReport) -> None:
        """A process says how its weights load."""

    def on_note(self, note: Note) -> None:
        """The supervisor has something to say."""

    def on_log(self, name: str, line: str) -> None:
        """A process wrote a line to stdout or stderr."""


class SilentWatcher:
    def on_state(self, view: ProcessView) -> None: ...

    def on_loading(self, name: str, report: LoadReport) -> None: ...

    def on_note(self, note: Note) -> None: ...

    def on_log(self, name: str, line: str) -> None: ...
