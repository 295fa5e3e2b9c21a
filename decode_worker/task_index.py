"""All tasks of one decode worker, indexed by each of their ids."""

from collections.abc import Callable

from decode_worker.spans import end_span
from decode_worker.task import DecodeTask, TaskPhase
from tandem.errors import InvalidRequest, ServingError
from tandem.values.ids import RequestId, TransferId
from worker.session_port import SessionPort


class TaskIndex:
    """Live tasks; a removed one is DONE and cannot be found any more."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        """`on_empty` is called each time the last task is removed."""
        self._on_empty = on_empty
        self._by_engine_id: dict[RequestId, DecodeTask] = {}
        self._by_transfer: dict[TransferId, DecodeTask] = {}
        self._by_order: dict[tuple[SessionPort, str, int], DecodeTask] = {}

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def add(self, task: DecodeTask) -> None:
        """Add a task. Raises InvalidRequest when the attempt, or its hand-off, is here already."""
        order = (task.port, str(task.request_id), task.attempt)
        if order in self._by_order or task.transfer_id in self._by_transfer:
            raise InvalidRequest(f"attempt {task.attempt} of this request already exists", param="request_id")
        self._by_order[order] = task
        self._by_engine_id[task.engine_id] = task
        if task.transfer_id is not None:
            self._by_transfer[task.transfer_id] = task

    def remove(self, task: DecodeTask, error: ServingError | None = None) -> None:
        """End and remove a task; `error`: why it was refused."""
        task.phase = TaskPhase.DONE
        end_span(task, error)
        while task.when_done:
            task.when_done.pop()()
        self._by_order.pop((task.port, str(task.request_id), task.attempt), None)
        self._by_engine_id.pop(task.engine_id, None)
        if task.transfer_id is not None:
            self._by_transfer.pop(task.transfer_id, None)
        if not self._by_engine_id:
            self._on_empty()

    def of_engine(self, engine_id: RequestId) -> DecodeTask | None:
        """The task with this engine id."""
        return self._by_engine_id.get(engine_id)

    def of_transfer(self, transfer_id: TransferId) -> DecodeTask | None:
        """The task with this hand-off."""
        return self._by_transfer.get(transfer_id)

    def of_order(self, port: SessionPort, request_id: str, attempt: int) -> DecodeTask | None:
        """The task of a router's order."""
        return self._by_order.get((port, request_id, attempt))

    def of_request(self, request_id: str) -> DecodeTask | None:
        """The latest attempt at a choice, of any router."""
        return next((t for t in reversed(self._by_engine_id.values()) if t.request_id == request_id), None)

    def pass_on(self, task: DecodeTask, port: SessionPort, attempt: int, *, handle: int = 0) -> None:
        """Assign a task to another router, or another attempt of the same. Raises InvalidRequest if that exists."""
        order = (port, str(task.request_id), attempt)
        if order in self._by_order:
            raise InvalidRequest(f"attempt {attempt} of this request already exists", param="request_id")
        if self._by_order.pop((task.port, str(task.request_id), task.attempt), None) is not None:
            self._by_order[order] = task
        task.port, task.attempt, task.handle = port, attempt, handle

    def of_port(self, port: SessionPort) -> list[DecodeTask]:
        """All tasks of one router's session."""
        return [task for task in self._by_engine_id.values() if task.port is port]
