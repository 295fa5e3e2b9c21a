"""Takeover of streams whose router has disconnected by another router."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.reports import refuse_order, send_all
from decode_worker.task import DecodeTask, TaskPhase
from decode_worker.task_index import TaskIndex
from tandem.errors import ServingError, StreamTaken, Unavailable
from tandem.telemetry.logs import about
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation, RequestId
from worker.session_port import SessionPort


@dataclass(slots=True, kw_only=True, eq=False)
class _Orphan:
    task: DecodeTask
    router: Incarnation
    lapses_s: float


class OrphanedStreams:
    """Tasks without a router, by request id. Without I/O; `now_s` is the worker's monotonic clock.

    A request may have several: the router that retried it after the first had gone may have gone too.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self._orphans: dict[RequestId, list[_Orphan]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._orphans.values()))

    def add(self, task: DecodeTask, *, now_s: float) -> None:
        """Keep `task`, whose router has gone, for `keep_s`."""
        orphan = _Orphan(task=task, router=task.port.router, lapses_s=now_s + self.keep_s)
        self._orphans.setdefault(task.request_id, []).append(orphan)

    def claim(self, request_id: RequestId) -> tuple[DecodeTask | None, list[DecodeTask]]:
        """Remove and return the latest task of a request, and the others, to be cancelled.

        The first is None when there is no such task, or it failed.
        """
        tasks = [orphan.task for orphan in self._orphans.pop(request_id, [])]
        given = next((task for task in reversed(tasks) if not task.is_over or task.finish is not None), None)
        return given, [task for task in tasks if task is not given]

    def lapsed(self, now_s: float) -> list[DecodeTask]:
        """Remove and return the tasks that no router has claimed in time."""
        return self._remove(lambda orphan: orphan.lapses_s <= now_s)

    def of_router(self, router: Incarnation) -> list[DecodeTask]:
        """Remove and return the tasks of a router that has reconnected: it has continued them elsewhere."""
        return self._remove(lambda orphan: orphan.router == router)

    def _remove(self, wanted: Callable[[_Orphan], bool]) -> list[DecodeTask]:
        gone = [orphan for orphans in self._orphans.values() for orphan in orphans if wanted(orphan)]
        for orphan in gone:
            left = self._orphans[orphan.task.request_id]
            left.remove(orphan)
            if not left:
                del self._orphans[orphan.task.request_id]
        return [orphan.task for orphan in gone]


_log = logging.getLogger(__name__)


class Takeovers:
    """Takeovers of one worker's streams. On the event loop's thread."""

    def __init__(
        self,
        tasks: TaskIndex,
        *,
        keep_s: float,
        cancel: Callable[[DecodeTask], None],
        go_on_here: Callable[[DecodeTask], None],
    ) -> None:
        """`go_on_here` gets the tasks that wait for their router to name another prefill worker."""
        self._tasks = tasks
        self._orphans = OrphanedStreams(keep_s=keep_s)
        self._ports: set[SessionPort] = set()
        """Ports of the connected routers."""
        self._cancel = cancel
        self._go_on_here = go_on_here

    def router_joined(self, port: SessionPort) -> None:
        """Cancel the streams of a router's earlier session, which it has continued elsewhere."""
        self._ports.add(port)
        for task in self._orphans.of_router(port.router):
            self._cancel(task)

    def router_left(self, port: SessionPort) -> None:
        """Keep a router's streams for a while, unless it has reconnected and continued them elsewhere."""
        self._ports.discard(port)
        is_back = any(other.router == port.router for other in self._ports)
        left, now_s = self._tasks.of_port(port), time.monotonic()
        for task in left:
            if is_back or not self._orphans.keep_s:
                self._cancel(task)
                continue
            self._orphans.add(task, now_s=now_s)
            if task.phase is TaskPhase.REROUTING:
                self._go_on_here(task)
        if left and self._orphans.keep_s:
            asyncio.get_running_loop().call_later(self._orphans.keep_s, self._end_lapsed)

    def take_over(self, port: SessionPort, order: pb.TakeOver) -> None:
        """Hand a stream to the router that claims it, with all tokens sent so far; or refuse."""
        orphan, others = self._orphans.claim(RequestId(order.request_id))
        for other in others:
            self._cancel(other)
        task = orphan or self._tasks.of_request(order.request_id)
        try:
            former = self._pass_on(task, port, order)
        except ServingError as error:
            if orphan is not None:
                self._cancel(orphan)
            refuse_order(port, order.request_id, order.attempt, error)
            return
        refuse_order(*former, StreamTaken("the client has taken this stream elsewhere"))
        if task is not None:
            send_all(task)
            if task.phase is TaskPhase.REROUTING:
                # The former router was asked for a route, and this one knows of no hand-off.
                self._go_on_here(task)

    def _pass_on(self, task: DecodeTask | None, port: SessionPort, order: pb.TakeOver) -> tuple[SessionPort, str, int]:
        """Give a stream to another router's session; returns the port, request and attempt that it belonged to."""
        with_logprobs = task is not None and task.request.params.num_logprobs is not None
        if task is None or not task.sent.can_send_from(order.num_shown, with_logprobs=with_logprobs):
            raise Unavailable("this stream is not on this worker")
        former = (task.port, order.request_id, task.attempt)
        self._tasks.pass_on(task, port, order.attempt, handle=order.handle)
        return former

    def _end_lapsed(self) -> None:
        for task in self._orphans.lapsed(time.monotonic()):
            if not task.is_over:
                _log.info(
                    "request %s: its router disconnected and no other took it over",
                    task.request_id,
                    extra=about(task.request_id),
                )
            self._cancel(task)
