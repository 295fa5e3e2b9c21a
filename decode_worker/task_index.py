"""All tasks of one decode worker, findable by each of the names that others know them under."""

from collections.abc import Callable

from decode_worker.spans import end_span
from decode_worker.task import DecodeTask, TaskPhase
from tandem.errors import InvalidRequest, ServingError
from tandem.values.ids import RequestId, TransferId
from worker.session_port import SessionPort


class TaskIndex:
    """Live tasks; one that is removed is DONE and nothing reaches it any more."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        """`on_empty` hears of each time that the last task goes."""
        self._on_empty = on_empty
        self._by_engine_id: dict[RequestId, DecodeTask] = {}
        self._by_transfer: dict[TransferId, DecodeTask] = {}
        self._by_order: dict[tuple[SessionPort, str, int], DecodeTask] = {}

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def add(self, task: DecodeTask) -> None:
        """Raises InvalidRequest when the attempt, or its hand-off, is here already."""
        order = (task.port, str(task.request_id), task.attempt)
        if order in self._by_order or task.transfer_id in self._by_transfer:
            raise InvalidRequest(f"attempt {task.attempt} of this request already exists", param="request_id")
        self._by_order[order] = task
        self._by_engine_id[task.engine_id] = task
        if task.transfer_id is not None:
            self._by_transfer[task.transfer_id] = task

    def remove(self, task: DecodeTask, error: ServingError | None = None) -> None:
        """The task is over; `error`: why it was refused."""
        task.phase = TaskPhase.DONE
        end_span(task, error)
        if task.when_done is not None:
            task.when_done()
            task.when_done = None
        self._by_order.pop((task.port, str(task.request_id), task.attempt), None)
        self._by_engine_id.pop(task.engine_id, None)
        if task.transfer_id is not None:
            self._by_transfer.pop(task.transfer_id, None)
        if not self._by_engine_id:
            self._on_empty()

    def of_engine(self, engine_id: RequestId) -> DecodeTask | None:
        """By the engine's name."""
        return self._by_engine_id.get(engine_id)

    def of_transfer(self, transfer_id: TransferId) -> DecodeTask | None:
        """By the hand-off's name."""
        return self._by_transfer.get(transfer_id)

    def of_order(self, port: SessionPort, request_id: str, attempt: int) -> DecodeTask | None:
        """By the router's name."""
        return self._by_order.get((port, request_id, attempt))

    def of_request(self, request_id: str) -> DecodeTask | None:
        """The latest attempt at a choice, whichever router it belongs to."""
        return next((t for t in reversed(self._by_engine_id.values()) if t.request_id == request_id), None)

    def pass_on(self, task: DecodeTask, port: SessionPort, attempt: int) -> None:
        """From now on it is another router's, or another attempt of the same. Raises InvalidRequest if that is here."""
        order = (port, str(task.request_id), attempt)
        if order in self._by_order:
            raise InvalidRequest(f"attempt {attempt} of this request already exists", param="request_id")
        if self._by_order.pop((task.port, str(task.request_id), task.attempt), None) is not None:
            self._by_order[order] = task
        task.port, task.attempt = port, attempt

    def of_port(self, port: SessionPort) -> list[DecodeTask]:
        """All that one router has here."""
        return [task for task in self._by_engine_id.values() if task.port is port]
