"""The user's view of a cluster's processes, and the interface of its displays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.supervisor.supervisor import Note, ProcessState, Role
from tandem.process.load_progress import LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """State of one process, as shown to the user."""

    name: str
    role: Role
    state: ProcessState
    pid: int | None
    address: str
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Last ready line of the process: worker_id, num_blocks, block_size, kv_bytes, weights_bytes, model, load_s, …"""

    @property
    def worker_id(self) -> str:
        """Id that the worker chose; its name before that."""
        return str(self.ready.get("worker_id", self.name))


class Watcher(Protocol):
    """Displays events to the user. Called on the event loop; must not raise."""

    def on_state(self, view: ProcessView) -> None:
        """Called when a process has changed state."""

    def on_loading(self, name: str, report: LoadReport) -> None:
        """Called with a process's progress in loading weights."""

    def on_note(self, note: Note) -> None:
        """Called with a notice of the supervisor."""

    def on_log(self, name: str, line: str) -> None:
        """Called with a line that a process wrote to stdout or stderr."""


class SilentWatcher:
    def on_state(self, view: ProcessView) -> None: ...

    def on_loading(self, name: str, report: LoadReport) -> None: ...

    def on_note(self, note: Note) -> None: ...

    def on_log(self, name: str, line: str) -> None: ...
