"""Streams that change hands: whose router has gone, and to which router they go next."""

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
    """Tasks without a router, by the name of their choice. Without I/O; `now_s` is the worker's monotonic clock.

    A choice may have several: the router that began it anew after the first one has gone, too.
    """

    def __init__(self, *, keep_s: float) -> None:
        self.keep_s = keep_s
        self._orphans: dict[RequestId, list[_Orphan]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._orphans.values()))

    def take_in(self, task: DecodeTask, *, now_s: float) -> None:
        """Its router has gone."""
        orphan = _Orphan(task=task, router=task.port.router, lapses_s=now_s + self.keep_s)
        self._orphans.setdefault(task.request_id, []).append(orphan)

    def give_away(self, request_id: RequestId) -> tuple[DecodeTask | None, list[DecodeTask]]:
        """The latest to a router that asks for it, and others of its choice, which nobody needs any more.

        None: it is not here, or came to no good end.
        """
        tasks = [orphan.task for orphan in self._orphans.pop(request_id, [])]
        given = next((task for task in reversed(tasks) if not task.is_over or task.finish is not None), None)
        return given, [task for task in tasks if task is not given]

    def lapsed(self, now_s: float) -> list[DecodeTask]:
        """Those that nobody has asked for in time; they are not here any more."""
        return self._let_go(lambda orphan: orphan.lapses_s <= now_s)

    def of_router(self, router: Incarnation) -> list[DecodeTask]:
        """Those that a router which is back has long continued elsewhere; they are not here any more."""
        return self._let_go(lambda orphan: orphan.router == router)

    def _let_go(self, wanted: Callable[[_Orphan], bool]) -> list[DecodeTask]:
        gone = [orphan for orphans in self._orphans.values() for orphan in orphans if wanted(orphan)]
        for orphan in gone:
            left = self._orphans[orphan.task.request_id]
            left.remove(orphan)
            if not left:
                del self._orphans[orphan.task.request_id]
        return [orphan.task for orphan in gone]


_log = logging.getLogger(__name__)


class Takeovers:
    """One worker's. On the event loop's thread."""

    def __init__(
        self,
        book: TaskIndex,
        *,
        keep_s: float,
        cancel: Callable[[DecodeTask], None],
        go_on_here: Callable[[DecodeTask], None],
    ) -> None:
        """`go_on_here` is told of tasks that wait for a router's word on who computes their prompt."""
        self._book = book
        self._orphans = OrphanedStreams(keep_s=keep_s)
        self._ports: set[SessionPort] = set()
        """Of routers that are here."""
        self._cancel = cancel
        self._go_on_here = go_on_here

    def router_came(self, port: SessionPort) -> None:
        """What it had in an earlier session here it has continued elsewhere."""
        self._ports.add(port)
        for task in self._orphans.of_router(port.router):
            self._cancel(task)

    def router_left(self, port: SessionPort) -> None:
        """Its requests go on for a while, unless it is here again and has continued them elsewhere."""
        self._ports.discard(port)
        is_back = any(other.router == port.router for other in self._ports)
        left, now_s = self._book.of_port(port), time.monotonic()
        for task in left:
            if is_back or not self._orphans.keep_s:
                self._cancel(task)
                continue
            self._orphans.take_in(task, now_s=now_s)
            if task.phase is TaskPhase.REROUTING:
                self._go_on_here(task)
        if left and self._orphans.keep_s:
            asyncio.get_running_loop().call_later(self._orphans.keep_s, self._end_lapsed)

    def adopt(self, port: SessionPort, adopt: pb.Adopt) -> None:
        """Hand a stream to the router that asks for it, with all that was said of it; or refuse."""
        orphan, others = self._orphans.give_away(RequestId(adopt.request_id))
        for other in others:
            self._cancel(other)
        task = orphan or self._book.of_request(adopt.request_id)
        try:
            former = self._pass_on(task, port, adopt)
        except ServingError as error:
            if orphan is not None:
                self._cancel(orphan)
            refuse_order(port, adopt.request_id, adopt.attempt, error)
            return
        refuse_order(*former, StreamTaken("the client has taken this stream elsewhere"))
        if task is not None:
            send_all(task)

    def _pass_on(self, task: DecodeTask | None, port: SessionPort, adopt: pb.Adopt) -> tuple[SessionPort, str, int]:
        """Give a stream to another router's session; returns the port, request and attempt that it belonged to."""
        with_logprobs = task is not None and task.request.params.num_logprobs is not None
        if task is None or not task.sent.can_send_from(adopt.num_shown, with_logprobs=with_logprobs):
            raise Unavailable("this stream is not on this worker")
        former = (task.port, adopt.request_id, task.attempt)
        self._book.pass_on(task, port, adopt.attempt)
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
